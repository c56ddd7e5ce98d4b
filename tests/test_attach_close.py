"""The model and the files that an attached run leaves behind."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from offbeat import LocalSGD
from tests.conformance.table import AnyStrategy, every_strategy
from tests.support import loops
from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes

Tensors = dict[str, Tensor]


def _left_by(strategy: Any, how: str) -> tuple[Tensors, Tensors]:
    """The tensors just before and just after an attachment ends."""
    rank = dist.get_rank()
    model = loops.mlp(rank)
    optimizer = loops.momentum(model)
    sync = offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S)
    loops.train(model, optimizer, loops.batches(rank, 3))
    own = loops.tensors(model)
    if how == "failure":
        try:
            with sync:
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
    else:
        sync.close(publish=how == "publish")
    return own, loops.tensors(model)


def test_what_close_publishes_is_the_mean(crew) -> None:
    (own, closed), (own_there, closed_there) = crew(2).run(_left_by, LocalSGD(period=2), "publish")
    assert loops.equal(closed, closed_there)
    for name, tensor in closed.items():
        assert torch.equal(tensor, own[name] * 0.5 + own_there[name] * 0.5)


@pytest.mark.parametrize("how", ["keep", "failure"])
def test_close_without_publishing_keeps_each_ranks_own(crew, how: str) -> None:
    (own, closed), (own_there, closed_there) = crew(2).run(_left_by, LocalSGD(period=2), how)
    assert loops.equal(own, closed)
    assert loops.equal(own_there, closed_there)
    assert not loops.equal(own, own_there)


def _saved_bytes(thing: Any) -> int:
    file = io.BytesIO()
    torch.save(thing, file)
    return file.tell()


class Layers(nn.Module):
    """One large layer, and small ones of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.large = nn.Linear(400, 300)
        self.norm = nn.LayerNorm(8)
        self.image = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scale = nn.Parameter(torch.ones(()))


def test_files_of_an_attached_model_are_as_small_as_ever(crew) -> None:
    crew(1).run(_files)


def _files() -> None:
    plain, model = Layers(), Layers()
    sync = offbeat.attach(model, loops.sgd(model), LocalSGD(period=2), timeout_s=HANG_S)
    for part in (lambda m: m.state_dict(), lambda m: m.norm, lambda m: m, copy.deepcopy):
        assert (
            abs(_saved_bytes(part(model)) - _saved_bytes(part(plain))) < 4096
        )  # notes of its own, no weights
    for param, before in zip(model.parameters(), plain.parameters(), strict=True):
        assert param.untyped_storage().nbytes() == param.nbytes
        assert param.stride() == before.stride()
        assert torch.equal(param, before)
    kept = model.state_dict()  # of an attachment that is gone
    sync.close()
    del sync
    gc.collect()
    junk = [torch.full((400, 300), 7.0) for _ in range(20)]
    assert loops.equal(kept, plain.state_dict())
    assert len(junk) == 20


def _alive_after(strategy: AnyStrategy) -> int:
    """The parameters, and the replica, that live on without a collection of garbage."""
    rank = dist.get_rank()
    gc.collect()
    gc.disable()
    try:
        model = loops.mlp(rank)
        optimizer = loops.momentum(model)
        sync = offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S)
        loops.train(model, optimizer, loops.batches(rank, 5), samples=sync.samples)
        with sync.consensus():
            pass
        sync.close()
        watched = [weakref.ref(each) for each in (*model.parameters(), sync._session.replica)]
        del model, optimizer, sync
        return sum(each() is not None for each in watched)
    finally:
        gc.enable()


@every_strategy
def test_a_closed_attachment_is_freed_at_once(crew, strategy: AnyStrategy) -> None:
    """Weights of gigabytes must not wait for Python's garbage collector."""
    assert crew(2).run(_alive_after, strategy) == [0, 0]
