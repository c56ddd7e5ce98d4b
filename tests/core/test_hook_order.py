"""Hooks of the loop run before ours, whenever they were registered: a strategy sees what they leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offbeat
from tests.support import loops
from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes


def _halve(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad = param.grad / 2


def _clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.01)


def _bound(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for param in optimizer.param_groups[0]["params"]:
        param.data.clamp_(-0.1, 0.1)


def _train(strategy: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Train with hooks that are registered after attach, and by themselves, on the same data."""
    results = []
    for attached in (True, False):
        model = loops.mlp()
        optimizer = loops.sgd(model)
        sync = offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S) if attached else None
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(_halve)
        optimizer.register_step_pre_hook(_clip)
        optimizer.register_step_post_hook(_bound)
        loops.train(model, optimizer, loops.batches(0, 4))
        if sync is not None:
            sync.close()
        results.append([param.detach() for param in model.parameters()])
    return results[0], results[1]


@pytest.mark.parametrize(
    "strategy",
    [
        offbeat.BSP(),  # takes gradients in backward
        offbeat.SSP(staleness=0, push="update"),  # takes weights after the step
    ],
    ids=lambda strategy: strategy.name,
)
def test_hooks_that_come_later_run_first(crew, strategy: Any) -> None:
    for ours, alone in crew(2).run(_train, strategy):
        torch.testing.assert_close(ours, alone)


def _backward_of_one_rank() -> bool:
    model = loops.mlp()
    optimizer = loops.sgd(model)
    with offbeat.attach(model, optimizer, offbeat.BSP(), timeout_s=HANG_S) as sync:
        loops.train(model, optimizer, loops.batches(dist.get_rank(), 1))
        with sync.consensus():
            if dist.get_rank() == 0:
                nn.functional.cross_entropy(model(torch.ones(1, 20)), torch.tensor([1])).backward()
            with pytest.raises(offbeat.OffbeatError, match=r"optimizer.step\(\) inside consensus\(\)"):
                optimizer.step()
        loops.train(model, optimizer, loops.batches(dist.get_rank(), 2))
        return sync.metrics.steps == 3


def test_a_backward_inside_consensus_belongs_to_no_step(crew) -> None:
    assert crew(2).run(_backward_of_one_rank) == [True, True]
