"""Sampling: which samples a worker sees, in which order. The same in both worlds, for the same seed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import count

import torch
from torch import Tensor

from offbeat.errors import SettingError


@lru_cache(maxsize=2)  # in virtual time thousands of workers ask for the same one
def shuffled(samples: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(
        samples, generator=torch.Generator().manual_seed((seed * 1_000_003 + epoch) % (1 << 63))
    )


def steps_per_epoch(samples: int, workers: int, batch_size: int) -> int:
    """How often every worker can draw a full batch from its share."""
    if workers > samples:
        raise SettingError(f"{workers} workers, but only {samples} samples: each worker needs at least one")
    return max(1, samples // workers // batch_size)


def batches(
    samples: int, rank: int, workers: int, batch_size: int, seed: int, lengths: Tensor | None = None
) -> Iterator[Tensor]:
    """Indices of batch after batch, without end. Each epoch deals all samples out anew, to all alike.

    With `lengths`, the samples of a step are of similar length, on all workers.
    """
    batch_size = min(batch_size, samples // workers)
    together = workers * batch_size
    steps = steps_per_epoch(samples, workers, batch_size)
    for epoch in count():
        order = shuffled(samples, seed, epoch)[: steps * together]
        if lengths is not None:
            order = by_length(order, lengths, together, seed, epoch)
        yield from full_batches(order[rank::workers], batch_size)


def full_batches(order: Tensor, batch_size: int) -> Iterator[Tensor]:
    """One when it is asked for: `split` would make all of an epoch's first."""
    for end in range(batch_size, len(order) + 1, batch_size):
        yield order[end - batch_size : end]


def by_length(order: Tensor, lengths: Tensor, together: int, seed: int, epoch: int) -> Tensor:
    """The same samples so that each run of `together` is of similar length; the runs come in random order.

    Equally long samples stay in the order they are in, so a shuffled order gives other runs every time.
    """
    full = len(order) // together * together
    kept = order[:full]
    runs = kept[lengths[kept].argsort(stable=True)].reshape(-1, together)
    return torch.cat((runs[shuffled(len(runs), seed, epoch)].flatten(), order[full:]))
