"""Samplers for a DataLoader. Both divide the data into one chunk per worker.

    SelDP   the chunks form a ring; worker n starts at chunk n and cycles through all of them
    DefDP   each worker draws from its own chunk only, as is usual

    chunks  A B C     SelDP  worker 0: A B C    worker 1: B C A    worker 2: C A B
                      DefDP  worker 0: A        worker 1: B        worker 2: C

Under a strategy that seldom synchronizes, a worker learns mostly from its own samples; under SelDP (Tyagi &
Swany, 2023) these cover all of the data in the end. At any time no two workers draw from the same chunk.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence, Sized
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

from offbeat.core.fields import Whole, read_inside
from offbeat.data.batching import by_length, full_batches, shuffled
from offbeat.errors import SettingError


class Chunks(Sampler[int]):
    """Equal chunks of shuffled samples, one per worker; each pass over a chunk has an order of its own.

    data     the data set, or its length
    rank     this worker, out of `world` workers; None: as torch.distributed or torchrun says
    shards   the chunks as sample indices, such as `label_skew` makes, instead of equal random parts

    Samples that do not divide evenly are left out: fewer samples than workers, or, of given chunks, the
    samples beyond the length of the shortest. Call `set_epoch` before each epoch for another order.
    """

    def __init__(
        self,
        data: int | Sized,
        rank: int | None = None,
        world: int | None = None,
        seed: int = 0,
        shards: Sequence[Tensor | Sequence[int]] | None = None,
    ) -> None:
        samples = data if isinstance(data, int) else len(data)
        self.rank = _from_environment("RANK", 0) if rank is None else rank
        self.world = _from_environment("WORLD_SIZE", 1) if world is None else world
        self.seed = seed
        self.epoch = 0
        for name in ("rank", "world", "seed"):
            read_inside(name, Whole(), getattr(self, name))
        if not 0 <= self.rank < self.world:
            raise SettingError(f"rank={self.rank} of world={self.world}: ranks go from 0 to world − 1")
        if shards is None:
            self.size = samples // self.world
            self._indices = shuffled(samples, seed, 0)[: self.size * self.world]
        else:
            if len(shards) != self.world:
                raise SettingError(f"{len(shards)} shards for {self.world} workers: one per worker is needed")
            self.size = min(len(shard) for shard in shards)
            self._indices = torch.cat([torch.as_tensor(shard)[: self.size] for shard in shards])
            if len(self._indices) and not 0 <= int(self._indices.min()) <= int(self._indices.max()) < samples:
                raise SettingError(f"the shards contain indices beyond the {samples} samples")
        if self.size < 1:
            raise SettingError(
                f"{samples} samples in chunks for {self.world} workers leave one worker without any"
            )

    @property
    @abstractmethod
    def chunks_per_epoch(self) -> int:
        """The number of chunks that a worker draws from per epoch."""

    @abstractmethod
    def chunk(self, number: int) -> int:
        """Return the chunk of this worker's pass `number`; passes over chunks count from 0."""

    def at(self, number: int) -> Tensor:
        """Return the shuffled sample indices of this worker's pass `number`."""
        begin = self.chunk(number) * self.size
        return self._indices[begin : begin + self.size][shuffled(self.size, self.seed, number)]

    def batches(self, batch_size: int, lengths: Tensor | None = None) -> Iterator[Tensor]:
        """Yield full batches (or whole chunks, if smaller), chunk after chunk, without end.

        With `lengths`, the samples of a batch have similar lengths.
        """
        batch_size = min(batch_size, self.size)
        for number in count():
            order = self.at(number)
            if lengths is not None:
                order = by_length(order, lengths, batch_size, self.seed, number)
            yield from full_batches(order, batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch, as for torch's DistributedSampler."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.chunks_per_epoch * self.size

    def __iter__(self) -> Iterator[int]:
        first = self.epoch * self.chunks_per_epoch
        for number in range(first, first + self.chunks_per_epoch):
            yield from self.at(number).tolist()


class SelDP(Chunks):
    """Sampler that cycles through all chunks, from this worker's own on: an epoch is all of the data."""

    @property
    def chunks_per_epoch(self) -> int:
        return self.world

    def chunk(self, number: int) -> int:
        return (self.rank + number) % self.world


class DefDP(Chunks):
    """Sampler of this worker's own chunk only."""

    @property
    def chunks_per_epoch(self) -> int:
        return 1

    def chunk(self, number: int) -> int:
        return self.rank


SAMPLERS: dict[str, type[Chunks]] = {"seldp": SelDP, "defdp": DefDP}


def _from_environment(name: str, default: int) -> int:
    """Return RANK or WORLD_SIZE of the process group, or else of the environment, or else `default`."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() if name == "RANK" else dist.get_world_size()
    return int(os.environ.get(name, default))
