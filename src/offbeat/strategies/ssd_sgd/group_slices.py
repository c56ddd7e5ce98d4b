"""Group slices: where spans of the flat weights lie, by parameter group.

A part of a pull cuts through parameters, but each group has its own learning rate. So a part is processed in
group slices, each as long as possible within its group, so that they are few.

    flat weights     │ parameter a │ parameter b          │ c │ parameter d │   a, b and d in group 0, c in 1
    two spans            ░░░░░░░░░░░░░░░░░░░           ░░░░░░░░░░░░
    group slices         ───────────────────           ─ ───── ────            group 0; 0, 1, 0
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

from torch import Tensor, nn

from offbeat.core.replica import Replica


class GroupSlice(NamedTuple):
    """A slice of one of the flat tensors."""

    kind: int  # the flat tensor's number
    start: int
    stop: int


class GroupSlices:
    """The slices of each parameter group within spans of the flat weights; `spans` has a list per tensor."""

    def __init__(self, replica: Replica, spans: Sequence[Sequence[tuple[int, int]]]) -> None:
        self._by_group: list[list[GroupSlice]] = [[] for _ in replica.optimizer.groups]
        for group, run in group_runs(replica):
            of_kind = spans[run.kind]  # ascending, and of many workers with a small model mostly padding
            for at in range(bisect_right(of_kind, run.start, key=itemgetter(1)), len(of_kind)):
                start, stop = of_kind[at]
                if start >= run.stop:
                    break
                first, last = max(start, run.start), min(stop, run.stop)
                if first < last:
                    self._by_group[group].append(GroupSlice(run.kind, first, last))

    def of(self, flats: list[Tensor]) -> list[list[Tensor]]:
        """Return views of tensors that are laid out as the weights are: a list for each group."""
        return [[flats[kind][start:stop] for kind, start, stop in group] for group in self._by_group]

    def pieces(self, sizes: Sequence[int]) -> list[list[GroupSlice]]:
        """Return the slices of each group, cut into pieces of at most `sizes[kind]` entries."""
        return [
            [
                GroupSlice(kind, first, min(first + sizes[kind], stop))
                for kind, start, stop in group
                for first in range(start, stop, sizes[kind])
            ]
            for group in self._by_group
        ]


def group_runs(replica: Replica) -> Iterator[tuple[int, GroupSlice]]:
    """Yield the flat weights cut wherever the parameter group changes, each slice with its group's number.

    A gap between two parameters goes with the first. Parameters in no group are skipped.
    """
    groups: dict[nn.Parameter, int] = {
        p: i for i, group in enumerate(replica.optimizer.groups) for p in group["params"]
    }
    kinds = zip(replica.weights, replica.flat_groups().values(), strict=True)
    for kind, (weight, blocks) in enumerate(kinds):
        places = [(groups.get(param), place) for block in blocks for param, place in block.places()]
        firsts = [next(run) for _, run in groupby(places, key=lambda place: place[0])]
        for (group, start), (_, stop) in pairwise([*firsts, (None, weight.numel())]):
            if group is not None:
                yield group, GroupSlice(kind, start, stop)
