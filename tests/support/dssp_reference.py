"""DSSP read from its description once more: workers, seconds and credits, without a server or messages."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

TOLERANCE = 0.01  # of a step of the worker that asks
FREE_PUSH = "the push that asks for credit spends none"
GRANTED_ANEW = "each request may grant high − low, however far ahead the worker is"
TIES_BY_ROUNDING = "of credits that are equally good, rounding decides"
ANY_SLOWEST = "of several slowest workers, the first counts"
LETTER = frozenset({FREE_PUSH, GRANTED_ANEW, TIES_BY_ROUNDING, ANY_SLOWEST})


@dataclass
class Reading:
    """One run in which exchanges take no time.

    letter: where the words of the description are followed to the letter, or leave a choice open that is made
    otherwise than ours.
    """

    step_s: Sequence[float]
    low: int
    high: int
    letter: frozenset[str] = frozenset()
    pushes: list[list[float]] = field(default_factory=list)  # of each worker, the times
    events: list[tuple[str, int]] = field(default_factory=list)  # "push" or "pull", and the worker, in order
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
            self.events.append(("push", p))
            if credit[p]:
                credit[p] -= 1
                goes = True
            elif self.gap(p) <= self.low:
                goes = True
            elif len(self.pushes[p]) == max(map(len, self.pushes)):
                granted = self.controller(p)
                goes = granted > 0
                credit[p] = granted if FREE_PUSH in self.letter else max(0, granted - 1)
            else:
                goes = False
            released = {q for q in waiting if self.gap(q) <= self.low}
            waiting -= released
            waiting |= set() if goes else {p}
            for q in released | ({p} if goes else set()):
                self.largest_gap = max(self.largest_gap, self.gap(q))
                self.events.append(("pull", q))
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
        if ANY_SLOWEST in self.letter:
            slowest = behind[0]
        most = self.high - self.low if GRANTED_ANEW in self.letter else self.high - self.gap(p) + 1
        if most < 0:
            return 0
        own = [self.pushes[p][-1], *self.predicted(p, most)]
        theirs = self.predicted(slowest, most + 1)
        nearest = [min(abs(mine - push) for push in theirs) for mine in own]
        tolerance = (
            (TIES_BY_ROUNDING not in self.letter) * TOLERANCE * (self.pushes[p][-1] - self.pushes[p][-2])
        )
        return next(r for r, distance in enumerate(nearest) if distance <= min(nearest) + tolerance)

    def predicted(self, q: int, count: int) -> list[float]:
        """Return the next pushes of a worker, one interval of its last two after the other."""
        interval = self.pushes[q][-1] - self.pushes[q][-2]
        return [self.pushes[q][-1] + k * interval for k in range(1, count + 1)]
