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


def batches(samples: int, rank: int, workers: int, batch_size: int, seed: int) -> Iterator[Tensor]:
    """Indices of batch after batch, without end. Each epoch deals all samples out anew, to all alike."""
    share = samples // workers
    batch_size = min(batch_size, share)
    for epoch in count():
        mine = shuffled(samples, seed, epoch)[rank : share * workers : workers]
        yield from mine.split(batch_size)[: steps_per_epoch(samples, workers, batch_size)]
