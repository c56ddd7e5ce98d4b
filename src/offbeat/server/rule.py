"""Rule: the server's half of a strategy. Pure decisions: no clock, no thread, no socket.

A push is folded into the weights as it comes; or, where a rule gives it a weight, it goes into a mean that is
folded in when the rule says so; or, where all keep step, it waits for those of all others. Time is data: a
rule that needs it asks to be woken.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

from offbeat.server.messages import Push

G = TypeVar("G")


class Rule(ABC, Generic[G]):
    """What a parameter server decides. The state is made by `init` and handed in at each call."""

    report: ClassVar[int] = 0
    """How many numbers it wants with each push."""

    together: ClassVar[bool] = False
    """Pushes wait for those of all who are here. Their mean is folded in as one, and only then are they
    acknowledged: so nobody is ahead of anybody by more than the push that it waits for."""

    sums: ClassVar[bool] = False
    """The server only adds up what the workers bring; the weights are theirs."""

    @abstractmethod
    def init(self) -> G: ...

    @abstractmethod
    def members(self, state: G) -> list[int]:
        """The workers that are here."""

    @abstractmethod
    def join(self, state: G, worker: int, clock: int | None) -> int:
        """A worker comes back with its clock, or is new (None); where its clock stands from now on."""

    @abstractmethod
    def leave(self, state: G, worker: int) -> None: ...

    def weight(self, state: G, push: Push) -> float | None:
        """A push has come: what it counts for in the mean that `due` folds in (0: it is dropped).

        None: it is folded in at once. What is not finite is not folded in, whatever it counts for.
        """
        return None

    def due(self, state: G) -> float | None:
        """Asked after every message: fold the mean of what has come in now, times this. None: not now."""
        return None

    @abstractmethod
    def advance(self, state: G, push: Push) -> None:
        """A worker that has pushed asks to go on."""

    @abstractmethod
    def admits(self, state: G, worker: int, clock: int) -> bool:
        """Whether a worker that has pushed `clock` times may have the weights now, and go on."""

    @abstractmethod
    def staleness_of(self, state: G, worker: int, clock: int | None) -> int:
        """By how many clocks the slowest worker's updates lag behind a reader who uses them at `clock`."""

    def hint(self, state: G, worker: int) -> int:
        """What a worker is told with the weights that it is let on with."""
        return 0

    def tick(self, state: G, at_s: float) -> None:
        """It is so late, a message says."""

    def wake_at(self, state: G) -> float | None:
        """When it wants a tick. None: it does not."""
        return None


@dataclass
class Clocks:
    """How often each worker that is here has pushed."""

    of: dict[int, int] = field(default_factory=dict)

    def join(self, worker: int, clock: int | None) -> int:
        """A newcomer starts where the slowest is: it holds nobody up more than that one does."""
        self.of[worker] = self.slowest if clock is None else clock
        return self.of[worker]

    @property
    def slowest(self) -> int:
        return min(self.of.values(), default=0)


class ClockRule(Rule[Clocks]):
    """A rule that looks at clocks alone."""

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


class LockStep(ClockRule):
    """All push; the server steps once, with the mean; nobody's next push comes before that."""

    together = True

    def admits(self, state: Clocks, worker: int, clock: int) -> bool:
        return state.of.get(worker, clock) >= clock


class ReduceOnly(ClockRule):
    """Nothing is pushed or pulled."""

    sums = True

    def admits(self, state: Clocks, worker: int, clock: int) -> bool:
        return True
