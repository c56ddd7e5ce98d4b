"""Gradients: what one step left unasked must not reach into the next."""

from __future__ import annotations

import pytest
import torch

import offbeat
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


def _gathered(grad_of_first: torch.Tensor) -> None:
    model = loops.mlp()
    gradients = GradientBuckets(Replica(model))
    model[0].weight.grad_dtype = None
    model[0].weight.grad = grad_of_first
    gradients.on_backward_end()


def test_gradients_that_cannot_travel_as_they_are_are_refused() -> None:
    weight = torch.ones(64, 20, requires_grad=True)
    with pytest.raises(offbeat.OffbeatError, match=r"0.weight has a graph .*create_graph=True"):
        _gathered(weight * 2)
    with pytest.raises(offbeat.OffbeatError, match=r"0.weight is torch.float32, but .* torch.float64"):
        _gathered(torch.ones(64, 20, dtype=torch.float64))


def test_a_gradient_that_comes_after_backward_is_refused() -> None:
    """The others have averaged without it."""
    model = loops.mlp()
    replica = Replica(model)
    gradients = GradientBuckets(replica)
    (block,) = replica.blocks
    model[0].weight.grad = torch.ones(64, 20)
    gradients.on_backward_end()
    block.hand_out()
    gradients.check_complete()
    model[4].bias.grad = torch.ones(5)
    with pytest.raises(offbeat.OffbeatError, match=r"4.bias had no gradient on any rank .* no_sync\(\)"):
        gradients.check_complete()
    gradients.on_backward_start()
    gradients.check_complete()
