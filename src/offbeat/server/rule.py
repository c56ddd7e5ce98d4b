"""Rules: when may a worker continue? Pure decisions, without a clock, a thread or a socket.

An `Aggregation` answers another question: when does a push become part of the weights?
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from offbeat.server.messages import Push

G = TypeVar("G")


class Rule(ABC, Generic[G]):
    """Admission of workers by a parameter server. `init` creates the state, which is passed to every call."""

    @abstractmethod
    def init(self) -> G:
        """Create the state before the first worker joins."""

    @abstractmethod
    def members(self, state: G) -> list[int]:
        """Return the workers that have joined and not left."""

    @abstractmethod
    def join(self, state: G, worker: int, clock: int | None) -> int:
        """Add a worker that returns with its clock, or is new (None); return its clock from now on."""

    @abstractmethod
    def leave(self, state: G, worker: int) -> None:
        """Remove a worker, so that no other waits for it."""

    @abstractmethod
    def advance(self, state: G, push: Push) -> None:
        """Count the worker's push in the clocks; called when its pull arrives."""

    @abstractmethod
    def admits(self, state: G, worker: int, clock: int) -> bool:
        """Return whether a worker that has pushed `clock` times may get the weights now, and continue."""

    def gate(self, state: G) -> Hashable:
        """Return what the admission of waiting workers depends on: while it is the same, they still wait.

        None: unknown, so every waiting worker is looked at after every message. So they are if a subclass
        changes `admits` without this method.
        """
        return None

    @abstractmethod
    def staleness_of(self, state: G, worker: int, clock: int | None) -> int:
        """Return by how many clocks the slowest worker's updates lag behind a reader at `clock`."""

    def hint(self, state: G, worker: int) -> int:
        """Return a number for the worker, sent with the weights."""
        return 0


class ClockTable(MutableMapping[int, int]):
    """Clocks by worker, which know the least and the greatest of them without a look at all.

    A worker may be marked as new: it is, until its clock changes.
    """

    def __init__(self) -> None:
        self._clocks: dict[int, int] = {}
        self._workers: dict[int, int] = {}  # the number of workers at each clock that any of them has
        self.least = 0  # of all clocks; 0 if there are none
        self.new: set[int] = set()  # workers
        self._new: Counter[int] = Counter()  # the number of new workers at each clock

    def mark_new(self, worker: int) -> None:
        """Mark a worker as new."""
        if worker not in self.new:
            self.new.add(worker)
            self._new[self._clocks[worker]] += 1

    def unmark_new(self, worker: int) -> None:
        """Mark a worker as new no longer."""
        if worker in self.new:
            self.new.remove(worker)
            self._new[self._clocks[worker]] -= 1

    @property
    def least_known(self) -> int:
        """The least clock of workers that are not new; of all, if all are."""
        return next((clock for clock, workers in self.counts() if workers > self._new[clock]), self.least)

    def __getitem__(self, worker: int) -> int:
        return self._clocks[worker]

    def __setitem__(self, worker: int, clock: int) -> None:
        clocks, workers = self._clocks, self._workers
        before = clocks.get(worker)
        if before == clock:
            return
        if worker in self.new:
            self.unmark_new(worker)
        clocks[worker] = clock
        workers[clock] = workers.get(clock, 0) + 1
        if len(clocks) == 1 or clock < self.least:
            self.least = clock
        if before is None:
            return
        if workers[before] > 1:
            workers[before] -= 1
        else:
            self._remove(before)

    def __delitem__(self, worker: int) -> None:
        self.unmark_new(worker)
        self._remove(self._clocks.pop(worker))

    def _remove(self, clock: int) -> None:
        self._workers[clock] -= 1
        if not self._workers[clock]:
            del self._workers[clock]
            if clock == self.least:
                self.least = min(self._workers, default=0)

    @property
    def greatest(self) -> int:
        """The greatest of all clocks; 0 if there are none."""
        return max(self._workers, default=0)

    def counts(self) -> list[tuple[int, int]]:
        """Return each clock that a worker has, from the least on, and how many have it."""
        return sorted(self._workers.items())

    def __iter__(self) -> Iterator[int]:
        return iter(self._clocks)

    def __len__(self) -> int:
        return len(self._clocks)

    def __repr__(self) -> str:
        return repr(self._clocks)


@dataclass
class Clocks:
    """The number of pushes of each member."""

    of: ClockTable = field(default_factory=ClockTable)

    def join(self, worker: int, clock: int | None) -> int:
        """Add a worker that returns with its clock, or is new (None); return its clock.

        A new one starts at the slowest member's clock, so that it adds no delay. Members that are new
        themselves do not count: where somebody joins during every step, each would start at the clock of the
        one before, and the slowest clock would never advance.
        """
        self.of[worker] = start = self.of.least_known if clock is None else clock
        self.mark(worker, clock)
        return start

    def mark(self, worker: int, clock: int | None) -> None:
        """Mark a worker that has joined, with its clock or as a new one (None)."""
        if clock is None:
            self.of.mark_new(worker)
        else:
            self.of.unmark_new(worker)

    def is_new(self, worker: int) -> bool:
        """Return whether a member has not pushed since it joined."""
        return worker in self.of.new

    @property
    def slowest(self) -> int:
        return self.of.least


class ClockRule(Rule[Clocks]):
    """Rule that decides by clocks alone."""

    def init(self) -> Clocks:
        return Clocks()

    def members(self, state: Clocks) -> list[int]:
        return list(state.of)

    def join(self, state: Clocks, worker: int, clock: int | None) -> int:
        return state.join(worker, clock)

    def leave(self, state: Clocks, worker: int) -> None:
        state.of.pop(worker, None)

    def advance(self, state: Clocks, push: Push) -> None:
        state.of[push.worker] = push.clock

    def staleness_of(self, state: Clocks, worker: int, clock: int | None) -> int:
        return 0 if clock is None else max(0, clock - state.slowest)


class Unbounded(ClockRule):
    """Rule that admits every worker at once."""

    def admits(self, state: Clocks, worker: int, clock: int) -> bool:
        return True


class LockStep(ClockRule):
    """Rule that admits a worker once its push counts; a `Barrier` counts all workers' pushes together."""

    def admits(self, state: Clocks, worker: int, clock: int) -> bool:
        return state.of.get(worker, clock) >= clock
