"""Slices of flat memory, one per worker: what a reduce-scatter or an all-gather of many workers takes.

Of a thousand workers each has a thousand slices, a million tensors in one process of virtual time. Most of
them nobody looks at: their sizes, which all workers share, and the memory that they lie in say as much.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import overload

import torch
from torch import Tensor


class Slices(Sequence[Tensor]):
    """Slices that follow each other in flat memory; each is cut out as a view when it is asked for.

    `memory` is one tensor or several, such as that of the others' slices and that of a worker's own between
    them. No slice lies across two of them.
    """

    def __init__(self, sizes: tuple[int, ...], *memory: Tensor) -> None:
        self.sizes = sizes
        self.memory = memory
        self.nbytes = _bytes_of(sizes, memory[0].element_size())  # of each slice
        self._begins = begins_of(sizes)
        self._ends = list(accumulate(part.numel() for part in memory))
        if self._ends[-1] != self._begins[-1]:
            raise ValueError(f"slices of {self._begins[-1]} entries in memory of {self._ends[-1]}")

    def joined(self) -> Tensor:
        """Return all slices as one tensor: the memory itself, if it is one already."""
        return self.memory[0] if len(self.memory) == 1 else torch.cat(self.memory)

    def fill(self, joined: Tensor) -> None:
        """Overwrite all slices by those of one tensor."""
        torch._foreach_copy_(self.memory, joined.split([part.numel() for part in self.memory]))

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, number: int) -> Tensor: ...

    @overload
    def __getitem__(self, number: slice) -> list[Tensor]: ...

    def __getitem__(self, number: int | slice) -> Tensor | list[Tensor]:
        if isinstance(number, slice):
            return [self[each] for each in range(len(self))[number]]
        begin, size = self._begins[range(len(self))[number]], self.sizes[number]
        at = min(bisect_right(self._ends, begin), len(self.memory) - 1)
        begin -= self._ends[at] - self.memory[at].numel()
        return self.memory[at][begin : begin + size]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[number] for number in range(len(self)))


@lru_cache(256)
def begins_of(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return where each slice begins, and where the last one ends."""
    return tuple(accumulate(sizes, initial=0))


@lru_cache(256)
def _bytes_of(sizes: tuple[int, ...], element_size: int) -> tuple[int, ...]:
    return tuple(size * element_size for size in sizes)
