"""Gradients: what one step left unasked must not reach into the next."""

from __future__ import annotations

import torch

from offbeat.core.gradients import GradientBuckets
from offbeat.core.replica import Replica
from tests.support import loops


def test_what_was_absent_in_one_step_is_not_in_the_next() -> None:
    """Not every step hands out what the others found: SelSync does so in synchronized steps only."""
    model = loops.mlp()
    replica = Replica(model)
    gradients = GradientBuckets(replica)
    (block,) = replica.blocks
    spare = model[4].bias
    for params in ([p for p in model.parameters() if p is not spare], list(model.parameters())):
        for param in model.parameters():
            param.grad = None
        for param in params:
            param.grad = torch.ones_like(param)
        assert gradients.on_backward_end() == [block]
        absent = [spare] if len(params) < len(block.params) else []
        assert [id(p) for p in block.absent] == [id(p) for p in absent]
        assert block.marks.sum() == len(params)
