"""Transfers that are alone on all of their links: none slows them down, so a heap of their ends will do.

Where messages are short and few, as on the internet, most of them never meet another on a link.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class _Solo(NamedTuple, Generic[T]):
    links: tuple[int, ...]
    end_s: float
    order: int
    transfer: T


class Solos(Generic[T]):
    """Transfers of which no two share a link, each with the time at which it ends."""

    def __init__(self) -> None:
        self._by_link: dict[int, _Solo[T]] = {}
        self._by_order: dict[int, _Solo[T]] = {}
        self._ends: list[
            tuple[float, int]
        ] = []  # a heap of ends and orders; of some that were taken out, too

    def add(self, links: tuple[int, ...], end_s: float, order: int, transfer: T) -> None:
        """Add a transfer on links that no other uses; `order` is its own."""
        solo = self._by_order[order] = _Solo(links, end_s, order, transfer)
        for link in links:
            self._by_link[link] = solo
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

    def take_on(self, links: Iterable[int]) -> list[T]:
        """Take out those on these links: they are alone no longer."""
        return [self._take(self._by_link[link]) for link in links if link in self._by_link]

    def take_all(self) -> list[T]:
        """Take out all."""
        return self.take_on(list(self._by_link))

    def _take(self, solo: _Solo[T]) -> T:
        del self._by_order[solo.order]
        for link in solo.links:
            del self._by_link[link]
        return solo.transfer
