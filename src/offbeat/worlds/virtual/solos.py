"""Transfers that no other slows down, because all of their links have room: a heap of their ends will do.

A transfer is never faster than it would be alone. So a link that could carry all that is on it, each as fast
as it would be alone, never fills, and slows nobody down. Where messages are short and few, as on the
internet, most of them meet others at the server's link alone, which has room for many.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")
FULL = 0.99  # of a link, if several transfers are on it: what is below it is beyond any rounding


class Flow(NamedTuple):
    """A transfer alone: the bytes per second that it puts on each of its links, and how long it takes."""

    loads: tuple[tuple[int, float], ...]  # links, and bytes per second
    alone_s: float


class _Solo(NamedTuple, Generic[T]):
    flow: Flow
    order: int
    transfer: T


class Solos(Generic[T]):
    """Transfers of which none slows another down, each with the time at which it ends."""

    def __init__(self, bytes_per_s: npt.NDArray[np.float64]) -> None:
        """Keep the links' capacities, which change only while no transfer is here."""
        self._bytes_per_s = bytes_per_s
        self._by_link: dict[int, dict[int, _Solo[T]]] = {}  # by link and order
        self._load: dict[int, float] = {}  # of each link that has any
        self._by_order: dict[int, _Solo[T]] = {}
        # a heap of ends and orders; of some that were taken out, too
        self._ends: list[tuple[float, int]] = []

    def have_room(self, flow: Flow) -> bool:
        """Return whether a transfer would slow down none of these, and none of them it."""
        return not any(
            link in self._load and self._load[link] + load > FULL * self._bytes_per_s[link]
            for link, load in flow.loads
        )

    def add(self, flow: Flow, end_s: float, order: int, transfer: T) -> None:
        """Add a transfer for which there is room; `order` is its own."""
        solo = self._by_order[order] = _Solo(flow, order, transfer)
        for link, load in flow.loads:
            if link in self._load:
                self._by_link[link][order] = solo
                self._load[link] += load
            else:
                self._by_link[link] = {order: solo}
                self._load[link] = load
        heapq.heappush(self._ends, (end_s, order))

    @property
    def first_end_s(self) -> float:
        """The time at which the next one ends; infinite if there is none."""
        while self._ends and self._ends[0][1] not in self._by_order:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else math.inf

    def take_ended(self, until_s: float) -> list[T]:
        """Take out those that end by then, in order of their ends."""
        ended = []
        while self.first_end_s <= until_s:
            ended.append(self._take(self._by_order[heapq.heappop(self._ends)[1]]))
        return ended

    def take_met(self, links: Iterable[int]) -> list[T]:
        """Take out those on these links, with all that share a link with them, and so on."""
        met, found = list(links), []
        while met and self._by_link:
            for solo in list(self._by_link.get(met.pop(), {}).values()):
                met += [link for link, _ in solo.flow.loads]
                found.append(self._take(solo))
        return found

    def take_all(self) -> list[T]:
        """Take out all."""
        return self.take_met(list(self._by_link))

    def _take(self, solo: _Solo[T]) -> T:
        del self._by_order[solo.order]
        for link, load in solo.flow.loads:
            on_link = self._by_link[link]
            del on_link[solo.order]
            if on_link:
                self._load[link] -= load
            else:
                del self._by_link[link], self._load[link]
        return solo.transfer
