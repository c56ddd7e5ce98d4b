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


class NumberedBatches:
    """The batches of a run by their numbers from 0 on. Each epoch reshuffles all samples.

    Step s of all workers has the batches (s − 1) · workers to s · workers − 1. With `lengths`, the samples of
    a step have similar lengths.
    """

    def __init__(
        self, samples: int, workers: int, batch_size: int, seed: int, lengths: Tensor | None = None
    ) -> None:
        self._samples, self._workers, self._seed, self._lengths = samples, workers, seed, lengths
        self._size = min(batch_size, samples // workers)
        self._steps = steps_per_epoch(samples, workers, self._size)
        self._epoch = -1
        self._order = torch.empty(0)

    def __getitem__(self, number: int) -> Tensor:
        """Return the sample indices of a batch."""
        step, rank = divmod(number, self._workers)
        epoch, step = divmod(step, self._steps)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._order_of(epoch)
        run_size = self._workers * self._size
        return self._order[step * run_size + rank : (step + 1) * run_size : self._workers]

    def _order_of(self, epoch: int) -> Tensor:
        run_size = self._workers * self._size
        order = shuffled(self._samples, self._seed, epoch)[: self._steps * run_size]
        if self._lengths is None:
            return order
        return by_length(order, self._lengths, run_size, self._seed, epoch)


def batches(
    samples: int, rank: int, workers: int, batch_size: int, seed: int, lengths: Tensor | None = None
) -> Iterator[Tensor]:
    """Yield the sample indices of one worker's batches, one of each step, without end."""
    numbered = NumberedBatches(samples, workers, batch_size, seed, lengths)
    for step in count():
        yield numbered[step * workers + rank]


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
