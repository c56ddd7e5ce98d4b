"""Cuts of flat tensors into slices.

    even           slice k of n begins at ⌊k·G/n⌋ grains, where G = ⌈numel / grain⌉: two slices differ by one
                   grain at most, and the last is the largest (unless numel ends within a grain)
    equal          all slices have one size, a multiple of the grain; the last one may reach beyond the end
    at boundaries  slices begin and end at given places (where parameters do), nearest to an even cut

A grain is a number of entries that no cut separates. It differs by what is cut: weights and gradients are
cut at multiples of 64 bytes (`EvenSlice`, which DiLoCo's fragments and SSD-SGD's pulls are), packets of a
quantized tensor at multiples of the entries that have one scale, a server's shards at any entry.
Reduce-scatter is fastest with equal slices, so the slices of a sharded optimizer are equal where the
optimizer allows it.
"""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from torch import Tensor

ALIGNMENT_BYTES = 64
"""The alignment of torch's own allocations, with which vectorised kernels are fastest."""


def even_bound(numel: int, number: int, parts: int, grain: int = 1) -> int:
    """Return where slice `number` of `parts` begins; with `number` = `parts`, where the last one ends."""
    grains = -(-numel // grain)
    return min(numel, grain * (grains * number // parts))


def even_slices(flat: Tensor, parts: int, grain: int = 1) -> list[Tensor]:
    """Cut `flat` into even slices. Where there are fewer grains than parts, some slices are empty."""
    empty = flat[:0]  # of many parts of a small tensor most are empty: one view stands for all of these
    bounds = _even_bounds(flat.numel(), parts, grain)
    return [flat[start:stop] if start < stop else empty for start, stop in bounds]


@lru_cache(64)
def _even_bounds(numel: int, parts: int, grain: int) -> list[tuple[int, int]]:
    return list(pairwise(even_bound(numel, number, parts, grain) for number in range(parts + 1)))


def equal_size(numel: int, parts: int, grain: int) -> int:
    """Return the size of slices that are all equal, and together at least `numel` entries."""
    return -(-numel // (grain * parts)) * grain


def sizes_at_boundaries(boundaries: list[int], parts: int) -> list[int]:
    """Return the sizes of slices that begin and end at `boundaries` (ascending, from 0 to the end)."""

    def nearest(place: float) -> int:
        right = bisect(boundaries, place, hi=len(boundaries) - 1)
        return min(boundaries[max(0, right - 1)], boundaries[right], key=lambda edge: abs(edge - place))

    cuts = [nearest(boundaries[-1] * number / parts) for number in range(parts + 1)]
    return [stop - start for start, stop in pairwise(cuts)]


def grain_of(element_size: int) -> int:
    """Return how many entries of `element_size` bytes lie between two aligned addresses."""
    return ALIGNMENT_BYTES // element_size


@dataclass(frozen=True)
class EvenSlice:
    """Slice `number` of `parts` even slices of weights or gradients, cut where memory is aligned."""

    number: int = 0
    parts: int = 1

    def bounds(self, numel: int, element_size: int) -> tuple[int, int]:
        """Return where the slice begins and ends in a flat tensor of `numel` entries."""
        grain = grain_of(element_size)
        start, stop = (even_bound(numel, n, self.parts, grain) for n in (self.number, self.number + 1))
        return start, stop

    def of(self, flat: Tensor) -> Tensor:
        """Return the slice of `flat`, as a view."""
        start, stop = self.bounds(flat.numel(), flat.element_size())
        return flat[start:stop]


WHOLE = EvenSlice()
