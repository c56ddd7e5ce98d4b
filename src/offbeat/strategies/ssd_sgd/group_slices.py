"""Stretches: where some of the flat weights lie, by parameter group.

What cuts through parameters, and is still to be done at each group's own learning rate, is done to
stretches: as long as they can be within a group, so they are few.

    flat weights     │ parameter a │ parameter b          │ c │ parameter d │   a, b and d of one group
    two spans            ░░░░░░░░░░░░░░░░░░░           ░░░░░░░░░░░░
    stretches            ───────────────────           ─ ───── ────            of it, of c's, and of it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from torch import Tensor, nn

from offbeat.core.replica import Replica


class GroupSlice(NamedTuple):
    """Neighbours in one of the flat tensors."""

    kind: int  # of which
    start: int
    stop: int


class GroupSlices:
    """What spans of the flat weights hold of each parameter group; `spans` has a list for each tensor."""

    def __init__(self, replica: Replica, spans: Sequence[Sequence[tuple[int, int]]]) -> None:
        self._by_group: list[list[GroupSlice]] = [[] for _ in replica.optimizer.groups]
        for group, run in runs(replica):
            for start, stop in spans[run.kind]:
                first, last = max(start, run.start), min(stop, run.stop)
                if first < last:
                    self._by_group[group].append(GroupSlice(run.kind, first, last))

    def of(self, flats: list[Tensor]) -> list[list[Tensor]]:
        """Views of tensors that are laid out as the weights are: a list for each group."""
        return [[flats[kind][start:stop] for kind, start, stop in group] for group in self._by_group]


def runs(replica: Replica) -> Iterator[tuple[int, GroupSlice]]:
    """The flat weights cut wherever the parameter group changes, with the number of each piece's group.

    A gap between two parameters goes with the first. What is in no group is passed over.
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
