"""Pulls: which part of the weights comes in which step, and where it lies.

With t counted from 0 and a period of k steps, every part is pulled once in a period: part j in the steps
t ≡ j (mod k), but for t = 0, when there is nothing new yet. All of the weights are one part, or they are k:

    step              0     1     2     3     4     5     6          k = 3
    one part                            all               all
    three parts             1     2     0     1     2     0          each of every share
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from offbeat.core.blocks import EvenSlice
from offbeat.core.replica import Replica
from offbeat.strategies.ssd_sgd.group_slices import GroupSlices
from offbeat.strategies.ssd_sgd.weight_store import WeightStore


class ScheduledPull(NamedTuple):
    """What comes in one of them."""

    part: EvenSlice
    stretches: GroupSlices  # where that part lies
    prev: list[Tensor]  # in these it is as of the pull before
    w_glob: list[Tensor]  # into these it comes


class PullSchedule:
    """`rooms`: two that the weights fit into; each part comes into one and the other by turns."""

    def __init__(
        self, home: WeightStore, replica: Replica, period: int, parts: int, rooms: list[list[Tensor]]
    ) -> None:
        self._period = period
        self._rooms = rooms
        each = [EvenSlice(number, parts) for number in range(parts)]
        self._parts = [(part, GroupSlices(replica, home.spans(part))) for part in each]

    def of(self, t: int) -> ScheduledPull | None:
        """What is pulled in step t, if anything is."""
        turn, number = divmod(t, self._period)
        if t < 1 or number >= len(self._parts):
            return None
        return ScheduledPull(*self._parts[number], self._rooms[1 - turn % 2], self._rooms[turn % 2])
