"""Frozen parameters and buffers that the loop changes: what is published is one model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import prune

import offbeat
from tests.support import loops
from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes

Tensors = dict[str, Tensor]


class Model(nn.Module):
    """A teacher that follows, a mean that is assigned anew, a count that comes with the first batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(20, 5)
        self.teacher = nn.Linear(20, 5).requires_grad_(False)
        self.same = nn.Linear(20, 5).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(20))
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "seen"):
            self.register_buffer("seen", torch.zeros(1))
        self.seen += x.mean()
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.cache = torch.zeros(len(x) + dist.get_rank())  # of another length on each rank
        out: Tensor = self.body(x - self.mean)
        return out


def _follow(model: Model) -> None:
    for own, other in zip(model.teacher.parameters(), model.body.parameters(), strict=True):
        own.data.lerp_(other.data, 0.5)


def _run(strategy: Any) -> tuple[Tensors, Tensors, Tensors]:
    model = Model()
    optimizer = loops.sgd(model.body)
    with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S) as sync:
        data = loops.batches(dist.get_rank(), 3)
        loops.train(model, optimizer, data, after_step=lambda step: _follow(model))
        own = loops.tensors(model)
        with sync.consensus():
            shown = loops.tensors(model)
        assert loops.equal(own, loops.tensors(model)), "each has its own back"
    return own, shown, loops.tensors(model)


@pytest.mark.parametrize("strategy", [offbeat.LocalSGD(period=2), offbeat.BSP()], ids=str)
def test_there_is_one_published_model(crew, strategy: Any) -> None:
    (own, shown, closed), (other, also_shown, also_closed) = crew(2).run(_run, strategy)
    assert loops.equal(shown, also_shown) and loops.equal(closed, also_closed)
    assert loops.equal(shown, closed)
    for name in ("teacher.weight", "mean", "seen"):
        torch.testing.assert_close(shown[name], (own[name] + other[name]) / 2)
    assert torch.equal(shown["same.weight"], own["same.weight"])
    if isinstance(strategy, offbeat.BSP):
        assert torch.equal(own["mean"], other["mean"]), "averaged at each step, though it is assigned anew"


def _grow() -> str:
    model = Model()
    with offbeat.attach(model, loops.sgd(model.body), offbeat.BSP(), timeout_s=HANG_S) as sync:
        model.mean = torch.zeros(21)
        with pytest.raises(offbeat.OffbeatError) as told, sync.consensus():
            pass
        model.mean = torch.zeros(20)
        return str(told.value)


def test_a_buffer_of_another_shape_is_refused(crew) -> None:
    assert all("buffer mean has another shape" in told for told in crew(2).run(_grow))


def _prune() -> tuple[Tensors, Tensors]:
    model = loops.mlp()
    optimizer = loops.sgd(model)
    strategy = offbeat.LocalSGD(period=2)
    with offbeat.attach(model, optimizer, strategy, buffers="broadcast", timeout_s=HANG_S):
        loops.train(model, optimizer, loops.batches(dist.get_rank(), 3))
        prune.l1_unstructured(model[2], "weight", amount=0.5)
        own = loops.tensors(model)
    return own, loops.tensors(model)


def test_masks_of_pruning_are_one(crew) -> None:
    (own, closed), (other, also_closed) = crew(2).run(_prune)
    assert not torch.equal(own["2.weight_mask"], other["2.weight_mask"])
    assert loops.equal(closed, also_closed)
    assert torch.equal(closed["2.weight_mask"], own["2.weight_mask"])


def _freeze_one() -> str:
    model = loops.mlp()
    with offbeat.attach(model, loops.sgd(model), offbeat.BSP(), timeout_s=HANG_S) as sync:
        model.register_buffer("left" if dist.get_rank() else "right", torch.zeros(1))
        with pytest.raises(offbeat.OffbeatError) as told, sync.consensus():
            pass
        sync.close(publish=False)
        return str(told.value)


def test_models_that_were_changed_differently_are_refused(crew) -> None:
    told = crew(2).run(_freeze_one)
    assert "different buffers were registered" in told[0] and "right" in told[0] and "left" in told[1]
