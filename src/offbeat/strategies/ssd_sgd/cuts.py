"""Cuts: which elements of which parameter lie in which worker's slice of flat weights.

They follow from shapes, from the number of workers and from how slices are cut, and are the same on all of
them. So virtual workers, of which there may be thousands, share them: nothing here belongs to one model.

    flat weights     │ parameter a │ parameter b          │ c │ parameter d │   as the replica lays them out
    equal slices     │ slice 0           │ slice 1           │ slice 2 ····│   of one size, the last padded
    whole parameters │ slice 0     │ slice 1              │ slice 2         │
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from offbeat.core.partition import WHOLE, EvenSlice, equal_size, grain_of, sizes_at_boundaries
from offbeat.core.slices import begins_of


class Run(NamedTuple):
    """The elements of one parameter that lie in a slice, in the order of memory."""

    number: int  # the parameter's
    start: int
    stop: int
    offset: int  # in the slice


class Cuts:
    """The slices of all workers, and their parts."""

    def __init__(
        self, places: tuple[tuple[int, int], ...], numel: int, element_size: int, world: int, evenly: bool
    ) -> None:
        """Cut `numel` flat weights; `places` are where each parameter begins, and its elements."""
        self._places = places
        self._boundaries = [*(begin for begin, _ in places), numel]
        self._element_size = element_size
        self._evenly = evenly
        if evenly:
            self.sizes = (equal_size(numel, world, grain_of(element_size)),) * world
        else:
            self.sizes = tuple(sizes_at_boundaries(self._boundaries, world))
        self._spans: dict[EvenSlice, list[tuple[int, int]]] = {}
        self._sizes_of: dict[EvenSlice, tuple[int, ...]] = {}
        self._runs_of: dict[EvenSlice, dict[int, list[Run]]] = {}

    def spans(self, part: EvenSlice) -> list[tuple[int, int]]:
        """Return where this part of each worker's slice begins and ends."""
        if part not in self._spans:
            slices = pairwise(begins_of(self.sizes))
            self._spans[part] = [self._span(begin, end - begin, part) for begin, end in slices]
        return self._spans[part]

    def sizes_of(self, part: EvenSlice) -> tuple[int, ...]:
        """Return the size of this part of each worker's slice."""
        if part not in self._sizes_of:
            self._sizes_of[part] = tuple(stop - start for start, stop in self.spans(part))
        return self._sizes_of[part]

    def runs_of(self, part: EvenSlice) -> dict[int, list[Run]]:
        """Return the runs in this part of each worker's slice, with offsets in the part.

        Workers without any are left out: of many workers with a small model, most.
        """
        if part not in self._runs_of:
            end = self._boundaries[-1]  # slices beyond it are padding
            found = {
                worker: list(self._runs_between(start, stop))
                for worker, (start, stop) in enumerate(self.spans(part))
                if start < end
            }
            self._runs_of[part] = {worker: runs for worker, runs in found.items() if runs}
        return self._runs_of[part]

    def runs(self, parts: int) -> dict[int, list[Run]]:
        """Return the runs in each worker's slice, cut where parts end, with offsets in the slice."""
        found: dict[int, list[Run]] = {}
        for part in [EvenSlice(number, parts) for number in range(parts)]:
            for worker, runs in self.runs_of(part).items():
                ahead = self.spans(part)[worker][0] - self.spans(WHOLE)[worker][0]
                found.setdefault(worker, []).extend(run._replace(offset=run.offset + ahead) for run in runs)
        return dict(sorted(found.items()))

    def _span(self, begin: int, size: int, part: EvenSlice) -> tuple[int, int]:
        if self._evenly:
            start, stop = part.bounds(size, self._element_size)
            return begin + start, begin + stop
        inside = [place - begin for place in self._boundaries if begin <= place <= begin + size]
        cuts = [0, *accumulate(sizes_at_boundaries(inside or [0], part.parts))]
        return begin + cuts[part.number], begin + cuts[part.number + 1]

    def _runs_between(self, start: int, stop: int) -> Iterator[Run]:
        for number, (begin, numel) in enumerate(self._places):
            first, last = max(begin, start), min(begin + numel, stop)
            if first < last:
                yield Run(number, first - begin, last - begin, first - start)


shared_cuts = lru_cache(16)(Cuts)
"""The cuts of a layout, made at the first call; what a model's run leaves behind is numbers."""
