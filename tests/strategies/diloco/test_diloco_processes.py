"""DiLoCo over processes: stopped anywhere, what it publishes, and where it is LocalSGD."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

import offbeat
from offbeat import DiLoCo, ErrorFeedback, LocalSGD, TopK
from tests.conformance.features import batch_norm
from tests.conformance.table import AnyStrategy
from tests.support import loops
from tests.support.limits import HANG_S
from tests.support.resumed import resumed_run, straight_run

pytestmark = pytest.mark.processes

Tensors = dict[str, torch.Tensor]


@pytest.mark.parametrize(
    "strategy",
    [
        DiLoCo(period=6, fragments=2, delay=2, mix=0.3),
        DiLoCo(period=5, delay=4, outer_momentum=0.0),
        DiLoCo(period=5, delay=4, outer_lr=1.0, outer_momentum=0.0, average=0.5),
        DiLoCo(period=4, fragments=2, delay=1, codec=ErrorFeedback(TopK(0.25))),
    ],
    ids=str,
)
def test_stopped_with_anything_in_flight_and_resumed(crew, strategy: DiLoCo) -> None:
    """Before the first fragment, with the first or the last of them under way, with statistics, with none."""
    straight = crew(2).run(straight_run, strategy, "momentum")
    for stop in (0, 1, 2, 4, 5):
        stopped = crew(2).run(resumed_run, strategy, "momentum", stop)
        for one, other in zip(straight, stopped, strict=True):
            assert loops.equal(one, other), stop


def _trained(strategy: AnyStrategy, optimizer: str, steps: int) -> Tensors:
    return loops.tensors(loops.attached(dist.get_rank(), strategy, optimizer, steps, model=batch_norm)[0])


@pytest.mark.parametrize("world", [2, 4])
def test_with_an_outer_optimizer_that_does_nothing_it_is_local_sgd_bit_for_bit(crew, world: int) -> None:
    local = crew(world).run(_trained, LocalSGD(period=3), "adamw", 10)
    ours = crew(world).run(_trained, DiLoCo(period=3, outer_lr=1.0, outer_momentum=0.0), "adamw", 10)
    for one, other in zip(local, ours, strict=True):
        assert loops.equal(one, other)


def _looks(strategy: AnyStrategy, steps: int) -> list[Tensors]:
    """What is published before the first step and after each."""
    rank = dist.get_rank()
    model = loops.mlp(rank)
    optimizer = loops.sgd(model)
    looks = []
    with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S) as sync:

        def look(_: int) -> None:
            with sync.consensus():
                looks.append(loops.tensors(model))

        look(0)
        loops.train(model, optimizer, loops.batches(rank, steps), after_step=look)
    return looks


def test_the_global_weights_are_published_and_change_with_a_merge_only(crew) -> None:
    looks, looks_there = crew(2).run(_looks, DiLoCo(period=3, delay=1), 7)
    assert all(map(loops.equal, looks, looks_there))
    assert loops.equal(looks[0], loops.tensors(loops.mlp(0)))
    changed = [not loops.equal(one, other) for one, other in pairwise(looks)]
    assert changed == [False, False, True, False, False, True, False]


def _settled(often: bool) -> Tensors:
    rank = dist.get_rank()
    model = loops.mlp(rank)
    optimizer = loops.sgd(model)
    with offbeat.attach(model, optimizer, DiLoCo(period=4, delay=2), timeout_s=HANG_S) as sync:

        def settle(step: int) -> None:
            if often:
                sync.settle()
                on_its_way = step % 4 in (2, 3)
                state = sync._session.conductor.state
                assert bool(state.scattered or state.gathered) == on_its_way, step

        loops.train(model, optimizer, loops.batches(rank, 10), after_step=settle)
    with pytest.raises(offbeat.OffbeatError, match="closed"):
        sync.settle()
    return loops.tensors(model)


def test_to_settle_waits_and_changes_nothing(crew) -> None:
    for one, other in zip(crew(2).run(_settled, False), crew(2).run(_settled, True), strict=True):
        assert loops.equal(one, other)
