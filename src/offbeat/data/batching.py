"""Batches of a worker: which samples it sees, in which order; the same in both worlds for the same seed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import count

import torch
from torch import Tensor

from offbeat.errors import SettingError


@lru_cache(maxsize=2)  # in virtual time thousands of workers use the same order
def shuffled(samples: int, seed: int, epoch: int) -> Tensor:
    """Draw a permutation of the samples from seed and epoch."""
    return torch.randperm(
        samples, generator=torch.Generator().manual_seed((seed * 1_000_003 + epoch) % (1 << 63))
    )


def steps_per_epoch(samples: int, workers: int, batch_size: int) -> int:
    """Return how many full batches every worker can draw per epoch."""
    if workers > samples:
        raise SettingError(f"{workers} workers, but only {samples} samples: each worker needs at least one")
    return max(1, samples // workers // batch_size)


def batches(
    samples: int, rank: int, workers: int, batch_size: int, seed: int, lengths: Tensor | None = None
) -> Iterator[Tensor]:
    """Yield the sample indices of batch after batch, without end. Each epoch reshuffles all samples.

    With `lengths`, the samples of a step have similar lengths, on all workers.
    """
    batch_size = min(batch_size, samples // workers)
    global_batch_size = workers * batch_size
    steps = steps_per_epoch(samples, workers, batch_size)
    for epoch in count():
        order = shuffled(samples, seed, epoch)[: steps * global_batch_size]
        if lengths is not None:
            order = by_length(order, lengths, global_batch_size, seed, epoch)
        yield from full_batches(order[rank::workers], batch_size)


def full_batches(order: Tensor, batch_size: int) -> Iterator[Tensor]:
    """Yield full batches one at a time; `Tensor.split` would make all batches of an epoch first."""
    for end in range(batch_size, len(order) + 1, batch_size):
        yield order[end - batch_size : end]


def by_length(order: Tensor, lengths: Tensor, run_size: int, seed: int, epoch: int) -> Tensor:
    """Reorder samples so that each run of `run_size` has similar lengths; the runs are in random order.

    Equally long samples keep their order, so that another shuffled order gives other runs.
    """
    full = len(order) // run_size * run_size
    whole = order[:full]
    runs = whole[lengths[whole].argsort(stable=True)].reshape(-1, run_size)
    return torch.cat((runs[shuffled(len(runs), seed, epoch)].flatten(), order[full:]))
