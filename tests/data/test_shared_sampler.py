"""SharedSampler: ranks of a user's loop share the batches, and a dead one's go to the others."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat import SharedSampler
from offbeat.data.work import AHEAD
from tests.support.crew import Crew
from tests.support.waiting import until

AnyStrategy = offbeat.Strategy[Any]
QUORUM = offbeat.DiLoCo(period=2, on="server", quorum=1)
SAMPLES, BATCH_SIZE = 50, 4
DATA = TensorDataset(torch.arange(SAMPLES))


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _epochs(sampler: SharedSampler, count: int, workers: int = 0) -> list[list[int]]:
    """Return the samples that this worker sees in each pass."""
    loader = DataLoader(DATA, batch_sampler=sampler, num_workers=workers)
    seen = []
    for _ in sampler.epochs(count):
        seen.append([])
        for (batch,) in loader:
            seen[-1] += batch.tolist()
            sampler.done()
    return seen


@pytest.mark.usefixtures("alone")
def test_one_worker_sees_each_sample_once_an_epoch() -> None:
    first, second = _epochs(SharedSampler(DATA, BATCH_SIZE, seed=1), 2)
    assert sorted(first) == sorted(second) == list(range(SAMPLES))
    assert first != second
    (other,) = _epochs(SharedSampler(SAMPLES, BATCH_SIZE, seed=2, drop_last=True), 1)
    assert other != first
    assert len(set(other)) == len(other) == SAMPLES // BATCH_SIZE * BATCH_SIZE


@pytest.mark.usefixtures("alone")
def test_what_a_loop_broke_off_is_done_in_the_end() -> None:
    sampler = SharedSampler(DATA, BATCH_SIZE, lease_s=0.4)
    loader = DataLoader(DATA, batch_sampler=sampler)
    seen: list[int] = []
    passes = 0
    for _ in sampler.epochs(1):
        passes += 1
        for (batch,) in loader:
            if passes == 1 and len(seen) >= 12:
                break
            seen += batch.tolist()
            sampler.done()
    assert passes > 1
    assert sorted(seen) == list(range(SAMPLES))


@pytest.mark.usefixtures("alone")
def test_what_is_refused() -> None:
    with pytest.raises(offbeat.SettingError, match="3 samples leave no batch of 4"):
        SharedSampler(3, 4, drop_last=True)
    sampler = SharedSampler(DATA, BATCH_SIZE)
    with pytest.raises(offbeat.OffbeatError, match="more often than batches were taken"):
        sampler.done()
    list(sampler)
    with pytest.raises(offbeat.OffbeatError, match=r"13 batches were taken and none was reported: call done"):
        list(sampler)
    sampler.close()


def test_without_other_workers_to_share_with() -> None:
    with pytest.raises(offbeat.LaunchError, match="no process group to share batches in"):
        SharedSampler(DATA, BATCH_SIZE)


def _stepping(strategy: AnyStrategy | None) -> tuple[offbeat.Sync | None, Callable[[list[int]], None]]:
    """Return what this rank's loop is attached with, if with a strategy, and its step."""
    if strategy is None:
        return None, lambda batch: None
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step(batch: list[int]) -> None:
        optimizer.zero_grad()
        model(torch.tensor(batch, dtype=torch.float32)[:, None]).mean().backward()
        optimizer.step()

    return offbeat.attach(model, optimizer, strategy, timeout_s=60), step


def _share(killed: int, strategy: AnyStrategy | None) -> tuple[list[int], int, str]:
    """Return the samples of this rank, its steps under a strategy, and the samples of rank `killed`.

    That rank dies after two steps with more in hand; until then the others have not begun.
    """
    sync, step = _stepping(strategy)
    sampler = SharedSampler(DATA, BATCH_SIZE, sync=sync, lease_s=1.0)
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    if rank != killed:
        store.wait([f"killed-{killed}"])
    seen: list[int] = []
    for _ in sampler.epochs(2):
        for batch in sampler:
            if rank == killed and len(seen) == 2 * BATCH_SIZE:
                until(lambda: len(sampler._leases._held) == 1 + AHEAD)
                store.set(f"killed-{killed}", "")
                os.kill(os.getpid(), signal.SIGKILL)
            step(batch)
            seen += batch
            sampler.done()
            if rank == killed:
                sampler._thread.submit(int).result()  # the store knows now
                store.set("seen", ",".join(map(str, seen)))
    return seen, 0 if sync is None else sync.metrics.steps, store.get("seen").decode()


@pytest.mark.processes
@pytest.mark.parametrize("strategy", [None, offbeat.ASP()], ids=["alone", "asp"])
def test_the_batches_of_a_killed_rank_go_to_the_others(
    strategy: AnyStrategy | None, crew: Callable[[int], Crew]
) -> None:
    """Of a process group, and of an attachment whose server goes on without the rank."""
    ranks = crew(3)
    ranks.start(_share, 2, strategy)
    outcomes = ranks.outcomes()
    assert [ok for ok, _ in outcomes] == [True, True, False], outcomes
    (first, *_, before), (second, *_) = (value for ok, value in outcomes if ok)
    seen = [*first, *second, *map(int, before.split(","))]
    assert all(seen.count(sample) >= 2 for sample in range(SAMPLES)), "at least once in each of two epochs"
    if strategy is not None:
        steps = [value[1] for ok, value in outcomes if ok]
        assert sum(steps) == 2 * 13 - 2, "each batch is a step, and the killed rank has done two"


def _attached(strategy: AnyStrategy) -> tuple[int, list[int]]:
    sync, step = _stepping(strategy)
    assert sync is not None
    with sync:
        sampler = SharedSampler(DATA, BATCH_SIZE, sync=sync)
        seen: list[int] = []
        for _ in sampler.epochs(2):
            for batch in sampler:
                step(batch)
                sampler.done()
                seen += batch
        return sync.metrics.steps, seen


@pytest.mark.processes
@pytest.mark.parametrize("strategy", [offbeat.ASP(), QUORUM], ids=["asp", "diloco"])
def test_it_claims_through_an_attachment(strategy: AnyStrategy, crew: Callable[[int], Crew]) -> None:
    outcomes = crew(2).run(_attached, strategy)
    assert sorted(outcomes[0][1] + outcomes[1][1]) == sorted([*range(SAMPLES)] * 2)
    assert sum(steps for steps, _ in outcomes) == 2 * 13


def _in_step() -> str:
    with pytest.raises(offbeat.SettingError) as refused:
        _attached(offbeat.BSP())
    return str(refused.value)


@pytest.mark.processes
def test_strategies_that_move_in_step_are_refused(crew: Callable[[int], Crew]) -> None:
    assert all("under bsp all workers do equally many steps" in said for said in crew(2).run(_in_step))
