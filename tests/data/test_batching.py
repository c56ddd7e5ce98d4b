"""Batches of a worker: full ones of samples that no other worker sees in the same epoch, drawn by a seed."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.data.batching import batches, by_length, full_batches, shuffled, steps_per_epoch
from offbeat.errors import SettingError

sizes = st.integers(1, 5).flatmap(
    lambda workers: st.tuples(st.just(workers), st.integers(workers, 80), st.integers(1, 12))
)
seeds = st.integers(0, 1 << 40)


@given(st.integers(1, 100), seeds, st.integers(0, 9))
def test_an_order_is_a_permutation_by_seed_and_epoch(samples: int, seed: int, epoch: int) -> None:
    order = shuffled(samples, seed, epoch)
    assert torch.equal(order.sort().values, torch.arange(samples))
    shuffled.cache_clear()
    assert torch.equal(order, shuffled(samples, seed, epoch))
    if samples > 20:
        assert not torch.equal(order, shuffled(samples, seed, epoch + 1))
        assert not torch.equal(order, shuffled(samples, seed + 1, epoch))


@pytest.mark.parametrize(
    ("samples", "workers", "batch_size", "steps"),
    [(100, 4, 8, 3), (100, 4, 25, 1), (100, 4, 26, 1), (4, 4, 9, 1)],
)
def test_steps_of_an_epoch_by_hand(samples: int, workers: int, batch_size: int, steps: int) -> None:
    assert steps_per_epoch(samples, workers, batch_size) == steps


def test_a_worker_without_any_sample_is_refused() -> None:
    with pytest.raises(SettingError, match="5 workers, but only 4 samples: each worker needs at least one"):
        steps_per_epoch(4, 5, 8)


@given(sizes, seeds)
def test_no_two_workers_see_the_same_sample_in_an_epoch(size: tuple[int, int, int], seed: int) -> None:
    workers, samples, batch_size = size
    steps = steps_per_epoch(samples, workers, batch_size)
    epochs: list[list[int]] = [[], []]
    for rank in range(workers):
        drawn = list(islice(batches(samples, rank, workers, batch_size, seed), 2 * steps))
        assert {len(batch) for batch in drawn} == {min(batch_size, samples // workers)}
        for number, batch in enumerate(drawn):
            epochs[number // steps] += batch.tolist()
    for seen in epochs:
        assert len(set(seen)) == len(seen)
        assert set(seen) <= set(range(samples))


def test_one_worker_draws_the_shuffled_order() -> None:
    drawn = torch.cat(list(islice(batches(10, 0, 1, 3, seed=5), 3)))
    assert torch.equal(drawn, shuffled(10, 5, 0)[:9])


def test_only_full_batches() -> None:
    assert [batch.tolist() for batch in full_batches(torch.arange(8), 3)] == [[0, 1, 2], [3, 4, 5]]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=60), st.integers(1, 8), seeds)
def test_runs_have_similar_lengths_and_lose_no_sample(lengths: list[int], together: int, seed: int) -> None:
    of = torch.tensor(lengths)
    order = shuffled(len(lengths), seed, 0)
    ordered = by_length(order, of, together, seed, 0)
    assert torch.equal(ordered.sort().values, torch.arange(len(lengths)))
    full = len(lengths) // together * together
    assert torch.equal(ordered[full:], order[full:]), "what fills no run stays last"
    runs = sorted((int(of[run].min()), int(of[run].max())) for run in full_batches(ordered[:full], together))
    assert all(longest <= shortest for (_, longest), (shortest, _) in pairwise(runs))
