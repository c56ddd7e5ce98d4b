"""Pull schedule: which part of the weights is pulled in which step, and where it lies.

With t counted from 0 and a period of k steps, every part is pulled once in a period: part j in the steps
t ≡ j (mod k), except for t = 0, when nothing has changed yet. The weights are one part, or k parts:

    step              0     1     2     3     4     5     6          k = 3
    one part                            all               all
    three parts             1     2     0     1     2     0          each of every worker's slice
"""

from __future__ import annotations

from typing import NamedTuple

from offbeat.core.partition import EvenSlice
from offbeat.core.replica import Replica
from offbeat.strategies.ssd_sgd.group_slices import GroupSlices
from offbeat.strategies.ssd_sgd.weight_store import WeightStore


class ScheduledPull(NamedTuple):
    """The pull of one part."""

    part: EvenSlice
    slices: GroupSlices  # where the part lies


class PullSchedule:
    """The order of pulls."""

    def __init__(self, store: WeightStore, replica: Replica, period: int, parts: int) -> None:
        self._period = period
        each = [EvenSlice(number, parts) for number in range(parts)]
        self._parts = [ScheduledPull(part, GroupSlices(replica, store.spans(part))) for part in each]

    def of(self, t: int) -> ScheduledPull | None:
        """Return the pull of step t, or None if there is none."""
        number = t % self._period
        if t < 1 or number >= len(self._parts):
            return None
        return self._parts[number]
