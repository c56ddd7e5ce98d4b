"""Samplers: which worker draws which samples, and in which order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from offbeat import DefDP, LocalSGD, SelDP, SettingError
from offbeat.data.samplers import Chunks
from offbeat.experiments.job import Job
from offbeat.experiments.tasks.digits import Digits
from offbeat.experiments.tasks.quadratic import Quadratic

crews = st.integers(1, 6).flatmap(lambda world: st.tuples(st.just(world), st.integers(world, 60)))
seeds = st.integers(0, 1 << 40)
kinds = st.sampled_from([SelDP, DefDP])


def _epoch(kind: type[Chunks], samples: int, world: int, seed: int, epoch: int = 0) -> list[list[int]]:
    """What each worker draws in an epoch."""
    drawn = []
    for rank in range(world):
        sampler = kind(samples, rank, world, seed)
        sampler.set_epoch(epoch)
        drawn.append(list(sampler))
        assert len(drawn[-1]) == len(sampler)
    return drawn


@settings(deadline=None)
@given(crews, seeds, st.integers(0, 5))
def test_under_seldp_every_worker_goes_round_all_chunks(crew: tuple[int, int], seed: int, epoch: int) -> None:
    world, samples = crew
    size = samples // world
    drawn = _epoch(SelDP, samples, world, seed, epoch)
    chunks = [set(drawn[rank][:size]) for rank in range(world)]  # each starts at its own
    assert len(set.union(*chunks)) == world * size
    for rank, mine in enumerate(drawn):
        for visit in range(world):  # so at each time all workers are at different chunks
            assert set(mine[visit * size : (visit + 1) * size]) == chunks[(rank + visit) % world]


@settings(deadline=None)
@given(crews, seeds, st.integers(0, 5))
def test_under_defdp_every_worker_keeps_to_its_own(crew: tuple[int, int], seed: int, epoch: int) -> None:
    world, samples = crew
    first, later = _epoch(DefDP, samples, world, seed), _epoch(DefDP, samples, world, seed, epoch)
    assert [set(mine) for mine in first] == [set(mine) for mine in later]
    assert len({i for mine in first for i in mine}) == sum(map(len, first)) == samples // world * world
    assert first == [mine[: len(mine) // world] for mine in _epoch(SelDP, samples, world, seed)]


@settings(deadline=None)
@given(kinds, crews, seeds)
def test_orders_repeat_and_epochs_differ(kind: type[Chunks], crew: tuple[int, int], seed: int) -> None:
    world, samples = crew
    assert _epoch(kind, samples, world, seed) == _epoch(kind, samples, world, seed)
    assert {len(mine) for mine in _epoch(kind, samples, world, seed)} == {len(kind(samples, 0, world, seed))}
    if samples // world > 20:
        assert _epoch(kind, samples, world, seed) != _epoch(kind, samples, world, seed, epoch=1)
        assert _epoch(kind, samples, world, seed) != _epoch(kind, samples, world, seed + 1)


@settings(deadline=None)
@given(kinds, crews, seeds, st.integers(1, 70))
def test_the_loop_draws_full_batches_of_the_same(
    kind: type[Chunks], crew: tuple[int, int], seed: int, batch_size: int
) -> None:
    world, samples = crew
    sampler = kind(samples, world - 1, world, seed)
    batches = sampler.batches(batch_size)
    size = min(batch_size, sampler.size)
    a_visit = sampler.size // size
    for visit in range(2 * world):
        drawn = [next(batches) for _ in range(a_visit)]
        assert all(len(batch) == size for batch in drawn)
        assert torch.equal(torch.cat(drawn), sampler.at(visit)[: a_visit * size])


def test_they_fit_any_loader_and_find_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    data = TensorDataset(torch.arange(12))
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    told = SelDP(data, seed=7)
    assert (told.rank, told.world) == (2, 3)
    drawn = torch.cat([batch for (batch,) in DataLoader(data, batch_size=4, sampler=told)])
    assert drawn.tolist() == list(SelDP(12, rank=2, world=3, seed=7))


def test_shards_are_the_chunks() -> None:
    shards = [[0, 2, 4, 6], torch.tensor([1, 3, 5])]
    drawn = list(SelDP(7, rank=1, world=2, shards=shards))
    assert (set(drawn[:3]), set(drawn[3:])) == ({1, 3, 5}, {0, 2, 4})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"data": 10, "rank": 3, "world": 3}, "ranks go from 0"),
        ({"data": 2, "rank": 0, "world": 3}, "leave one worker without any"),
        ({"data": 9, "rank": 0, "world": 3, "shards": [[1], [2]]}, "one per worker is needed"),
        ({"data": 9, "rank": 0, "world": 2, "shards": [[1], [9]]}, "indices beyond the 9 samples"),
        ({"data": 9, "rank": 0, "world": 2, "shards": [[1], []]}, "leave one worker without any"),
    ],
)
def test_what_cannot_be_dealt(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        SelDP(**options)


# --- in the built-in loop


def _seen(order: str, workers: int, steps: int) -> list[set[int]]:
    """The labels each worker meets."""
    task = Digits()
    data = task.load()
    job = Job(task=task, strategy=LocalSGD(), workers=workers, order=order, skew=3)
    seen = []
    for rank in range(workers):
        batches = job.batches(data, rank, task.batch_size)
        seen.append({int(label) for _ in range(steps) for label in data.labels[next(batches)]})
    return seen


def test_on_skewed_shards_defdp_meets_its_own_labels_and_seldp_all() -> None:
    own = _seen("defdp", 4, 100)
    assert all(len(labels) <= 3 for labels in own)
    assert set.union(*own) == set(range(10))
    assert _seen("seldp", 4, 100) == [set(range(10))] * 4


def test_jobs_that_cannot_be_drawn() -> None:
    options = {"task": Quadratic(), "strategy": LocalSGD(), "workers": 2}
    with pytest.raises(SettingError, match="seldp or defdp"):
        Job(**options, skew=3)
    with pytest.raises(SettingError, match="unknown order 'sel'; did you mean 'seldp'"):
        Job(**options, order="sel")
    with pytest.raises(SettingError, match="beta=2"):
        Job(**options, inject=(0.5, 2))
    with pytest.raises(SettingError, match="quadratic has no classes"):
        Job(**options, order="defdp", skew=3).batches(Quadratic().load(), 0, 8)
