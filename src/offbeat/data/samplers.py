"""Samplers for a DataLoader: who draws from which part of the data. Both deal it into a chunk a worker.

    SelDP   the chunks stand in a ring; worker n starts at chunk n and goes round all of them
    DefDP   each worker keeps to its own chunk, as is usual

    chunks  A B C     SelDP  worker 0: A B C    worker 1: B C A    worker 2: C A B
                      DefDP  worker 0: A        worker 1: B        worker 2: C

A strategy whose workers seldom speak leaves each with what its own data taught it; under SelDP (Tyagi &
Swany, 2023) that is all of the data in the end. At any time no two workers are at the same chunk.
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
    """Equal chunks of shuffled samples, a chunk a worker; each visit to a chunk has an order of its own.

    data     the data set, or its length
    rank     this worker, and `world` how many there are; None: as torch.distributed or torchrun says
    shards   what to take as chunks instead of equal random parts, such as `label_skew` makes: indices

    What does not divide evenly is left out: fewer samples than there are workers, or, of shards, whatever
    the shortest lacks. Call `set_epoch` before each epoch for another order within the chunks.
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
        self.rank = _told("RANK", 0) if rank is None else rank
        self.world = _told("WORLD_SIZE", 1) if world is None else world
        self.seed = seed
        self.epoch = 0
        for name in ("rank", "world", "seed"):
            read_inside(name, Whole(), getattr(self, name))
        if not 0 <= self.rank < self.world:
            raise SettingError(f"rank={self.rank} of world={self.world}: ranks go from 0 to world − 1")
        if shards is None:
            self.size = samples // self.world
            self._dealt = shuffled(samples, seed, 0)[: self.size * self.world]
        else:
            if len(shards) != self.world:
                raise SettingError(f"{len(shards)} shards for {self.world} workers: one each is needed")
            self.size = min(len(shard) for shard in shards)
            self._dealt = torch.cat([torch.as_tensor(shard)[: self.size] for shard in shards])
            if len(self._dealt) and not 0 <= int(self._dealt.min()) <= int(self._dealt.max()) < samples:
                raise SettingError(f"the shards hold indices that {samples} samples do not have")
        if self.size < 1:
            raise SettingError(f"{samples} samples in chunks for {self.world} workers leave one without any")

    @property
    @abstractmethod
    def visits(self) -> int:
        """How many chunks an epoch takes a worker to."""

    @abstractmethod
    def chunk(self, visit: int) -> int:
        """Which chunk this worker is at."""

    def at(self, visit: int) -> Tensor:
        """The indices of a visit, counted from the start of training, in their order."""
        begin = self.chunk(visit) * self.size
        return self._dealt[begin : begin + self.size][shuffled(self.size, self.seed, visit)]

    def batches(self, batch_size: int, lengths: Tensor | None = None) -> Iterator[Tensor]:
        """Full batches (or whole chunks, if smaller), visit after visit, without end.

        With `lengths`, the samples of a batch are of similar length.
        """
        batch_size = min(batch_size, self.size)
        for visit in count():
            order = self.at(visit)
            if lengths is not None:
                order = by_length(order, lengths, batch_size, self.seed, visit)
            yield from full_batches(order, batch_size)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.visits * self.size

    def __iter__(self) -> Iterator[int]:
        for visit in range(self.epoch * self.visits, (self.epoch + 1) * self.visits):
            yield from self.at(visit).tolist()


class SelDP(Chunks):
    """Round all chunks, from this worker's own on: an epoch is all of the data."""

    @property
    def visits(self) -> int:
        return self.world

    def chunk(self, visit: int) -> int:
        return (self.rank + visit) % self.world


class DefDP(Chunks):
    """This worker's own chunk only."""

    @property
    def visits(self) -> int:
        return 1

    def chunk(self, visit: int) -> int:
        return self.rank


SAMPLERS: dict[str, type[Chunks]] = {"seldp": SelDP, "defdp": DefDP}


def _told(name: str, alone: int) -> int:
    """RANK or WORLD_SIZE, of the process group or else of the environment that would make one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() if name == "RANK" else dist.get_world_size()
    return int(os.environ.get(name, alone))
