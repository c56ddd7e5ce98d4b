"""DSSP read from its description once more: workers, seconds and credits, without a server or messages."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

TOLERANCE = 0.01  # of a step of the worker that asks


@dataclass
class Reading:
    """One run in which exchanges take no time.

    literal: a granted credit is not spent by the push that asked for it, and each request may grant
    high − low anew, as the words of the description have it.
    """

    step_s: Sequence[float]
    low: int
    high: int
    literal: bool = False
    pushes: list[list[float]] = field(default_factory=list)  # of each worker, the times
    largest_gap: int = 0  # with which a worker went on
    ended_s: float = 0.0  # when the first worker that had made all its steps might have gone on

    def run(self, steps: int) -> Reading:
        """Run until a worker that has made all its steps might go on."""
        workers = range(len(self.step_s))
        self.pushes = [[] for _ in workers]
        credit = [0 for _ in workers]
        waiting: set[int] = set()
        ends = [(seconds, worker) for worker, seconds in enumerate(self.step_s)]
        heapq.heapify(ends)
        while not self.ended_s:
            now, p = heapq.heappop(ends)
            self.pushes[p].append(now)
            if credit[p]:
                credit[p] -= 1
                goes = True
            elif self.gap(p) <= self.low:
                goes = True
            elif len(self.pushes[p]) == max(map(len, self.pushes)):
                granted = self.controller(p)
                goes = granted > 0
                credit[p] = granted if self.literal else max(0, granted - 1)
            else:
                goes = False
            released = {q for q in waiting if self.gap(q) <= self.low}
            waiting -= released
            waiting |= set() if goes else {p}
            for q in released | ({p} if goes else set()):
                self.largest_gap = max(self.largest_gap, self.gap(q))
                heapq.heappush(ends, (now + self.step_s[q], q))
                if len(self.pushes[q]) == steps:
                    self.ended_s = now
        return self

    def gap(self, p: int) -> int:
        return len(self.pushes[p]) - min(map(len, self.pushes))

    def controller(self, p: int) -> int:
        fewest = min(map(len, self.pushes))
        if fewest < 2:
            return 0
        behind = [q for q, made in enumerate(self.pushes) if len(made) == fewest]
        slowest = max(behind, key=lambda q: self.predicted(q, 1))
        most = self.high - self.low if self.literal else self.high - self.gap(p) + 1
        if most < 0:
            return 0
        own = [self.pushes[p][-1], *self.predicted(p, most)]
        theirs = self.predicted(slowest, most + 1)
        nearest = [min(abs(mine - push) for push in theirs) for mine in own]
        tolerance = TOLERANCE * (self.pushes[p][-1] - self.pushes[p][-2])
        return next(r for r, distance in enumerate(nearest) if distance <= min(nearest) + tolerance)

    def predicted(self, q: int, count: int) -> list[float]:
        """Return the next pushes of a worker, one interval of its last two after the other."""
        interval = self.pushes[q][-1] - self.pushes[q][-2]
        return [self.pushes[q][-1] + k * interval for k in range(1, count + 1)]
