"""Looks: while one worker evaluates the weights alone, the others stand still, and nobody's time counts.

    look     from a worker's word, by a connection of its own to each shard, to the end of that connection:
             so a look ends with the worker that looks, too
    holding  a shard sends nobody else the weights to train on, until the look is over
    owed     L, the seconds of the look: every other worker stands still for as long, so that all leave with
             the lead that they came with
    busy     while a look held others already, the seconds for which one who had not stopped yet let this
             worker wait: for these it stood still for another reason

A worker learns what it owes with its next answer. Of the seconds for which it was blocked it takes back
min(owed − busy, blocked): it stood still, and waited for nobody. For the rest of L it pauses, with its clock
stopped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Protocol


class Waiting(Protocol):
    """A worker's session, as far as looks concern it."""

    worker: int
    goes_on: bool  # whether it trains on with the answer that it waits for
    looked_s: float  # seconds of others' looks that it has been told of
    asked_s: float  # seconds of all looks when it began to wait
    busy_s: float

    @property
    def answered(self) -> bool: ...


class Looks:
    """The looks at one shard, under the shard's lock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lookers: dict[Hashable, int] = {}  # worker, by connection
        self._ended_s = 0.0  # seconds of the looks that are over
        self._since_s, self._until_s = 0.0, -math.inf  # of the latest

    def begin(self, connection: Hashable, worker: int, ago_s: float) -> None:
        """Begin a worker's look, which it began `ago_s` seconds ago, before its word was here."""
        if not self._lookers:
            self._since_s = max(self._until_s, self._clock() - ago_s)
        self._lookers[connection] = worker

    def end(self, connection: Hashable) -> None:
        """End a look. Of looks at the same time the last one ends them all."""
        del self._lookers[connection]
        if not self._lookers:
            self._until_s = self._clock()
            self._ended_s += self._until_s - self._since_s

    @property
    def seconds(self) -> float:
        """Seconds of all looks so far; at any time at most one counts."""
        return self._ended_s + (self._clock() - self._since_s if self._lookers else 0.0)

    def of(self, worker: int) -> bool:
        """Return whether this worker looks."""
        return worker in self._lookers.values()

    def forgive(self, waiting: Waiting) -> None:
        """Let a worker owe nothing: it has just come, or has looked itself."""
        waiting.looked_s = self.seconds

    def note_wait(self, waiting: Waiting) -> None:
        """Note that a worker begins to wait for an answer."""
        waiting.asked_s, waiting.busy_s = self.seconds, 0.0

    def note_answer(self, waiting: Waiting) -> None:
        """Note that a worker's answer is ready."""
        if self._hold(waiting.worker):
            waiting.busy_s = self.seconds - waiting.asked_s

    def admit(self, waiting: Waiting) -> bool:
        """Return whether a worker's answer may be sent: it is there, and no look holds it."""
        return waiting.answered and not (waiting.goes_on and self._hold(waiting.worker))

    def tell(self, waiting: Waiting) -> tuple[float, float]:
        """Return what a worker owes for looks that are over, and the busy seconds; it counts as told then."""
        if self._lookers:
            return 0.0, 0.0
        owed_s, waiting.looked_s = self.seconds - waiting.looked_s, self.seconds
        return owed_s, waiting.busy_s

    def _hold(self, worker: int) -> bool:
        return any(looker != worker for looker in self._lookers.values())

    def training_s(self, at_s: float) -> float:
        """Return a time of training: that of the clock, without the looks until then."""
        return at_s - self.seconds


class Debt:
    """Debt of one worker for the looks of others, by what the shards have told it."""

    def __init__(self, shards: int) -> None:
        self._told_s = [0.0] * shards  # each shard measures the same looks
        self._paid_s = 0.0

    def settle(self, told: Iterable[tuple[float, float]], blocked_s: float) -> tuple[float, float]:
        """Pay what is owed after an operation, for whose answers the worker was blocked for so long.

        `told`: owed and busy seconds, by shard. Return how much of that was none of training, and how long to
        pause.
        """
        all_busy_s = 0.0
        for shard, (owed_s, busy_s) in enumerate(told):
            self._told_s[shard] += owed_s
            all_busy_s = max(all_busy_s, busy_s)
        due_s = max(0.0, max(self._told_s) - self._paid_s)
        self._paid_s += due_s
        uncounted_s = max(0.0, min(due_s - all_busy_s, blocked_s))
        return uncounted_s, due_s - uncounted_s
