"""DSSP: dynamic stale-synchronous parallel (Zhao et al., 2019): SSP whose bound moves from `low` to `high`.

    on a push of p:  if p has credit, it spends one and continues
                     else if t_p − t_slowest ≤ low, it continues
                     else if p is the fastest, it asks the controller for credit, and continues if it gets any
                     else it waits until the gap is ≤ low
    controller:      from the two latest push times of p and of the slowest, predict the next pushes of both;
                     the credit r ≤ high − low is the one at which p's push lies nearest one of the slowest's

In the paper low = 3 and high − low = 12. Ours: credit that is granted counts for the push it was asked for
too, and never reaches beyond `high`, however often a worker asks; so no gap exceeds `high`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from offbeat.core.fields import Whole
from offbeat.errors import SettingError
from offbeat.server.messages import Push
from offbeat.server.rule import Clocks, Rule
from offbeat.strategies.push_pull import PushPull


@dataclass
class DSSPState:
    """Clocks, the two latest push times and the credit of each worker."""

    clocks: Clocks = field(default_factory=Clocks)
    times: dict[int, tuple[float, float]] = field(default_factory=dict)
    credit: dict[int, int] = field(default_factory=dict)
    free: set[int] = field(default_factory=set)  # workers that have spent credit, and may continue


@dataclass(frozen=True)
class DynamicStaleness(Rule[DSSPState]):
    """Rule of SSP whose bound credit may extend from `low` to `high`."""

    low: int
    high: int
    ahead: int = 0  # by how many clocks a worker asks for weights before it will use them

    def init(self) -> DSSPState:
        return DSSPState()

    def members(self, state: DSSPState) -> list[int]:
        return list(state.clocks.of)

    def join(self, state: DSSPState, worker: int, clock: int | None) -> int:
        return state.clocks.join(worker, clock)

    def leave(self, state: DSSPState, worker: int) -> None:
        state.clocks.of.pop(worker, None)
        state.times.pop(worker, None)
        state.credit.pop(worker, None)
        state.free.discard(worker)

    def advance(self, state: DSSPState, push: Push) -> None:
        worker, clocks = push.worker, state.clocks
        clocks.of[worker] = push.clock
        state.times[worker] = (state.times.get(worker, (push.at_s, push.at_s))[1], push.at_s)
        state.free.discard(worker)
        if self.gap(state, worker) <= self.low:
            if state.credit.get(worker):
                state.credit[worker] -= 1
            return
        if not state.credit.get(worker) and clocks.of[worker] == max(clocks.of.values()):
            state.credit[worker] = self.grant(state, worker)
        if state.credit.get(worker):
            state.credit[worker] -= 1
            state.free.add(worker)

    def admits(self, state: DSSPState, worker: int, clock: int) -> bool:
        return worker in state.free or clock - state.clocks.slowest <= self.low

    def gate(self, state: DSSPState) -> int:
        return state.clocks.slowest  # a worker is set free only when its pull arrives

    def staleness_of(self, state: DSSPState, worker: int, clock: int | None) -> int:
        return 0 if clock is None else max(0, clock - state.clocks.slowest)

    def gap(self, state: DSSPState, worker: int) -> int:
        """Return by how many clocks the slowest worker will lag when this one uses weights read now."""
        return state.clocks.of[worker] + self.ahead - state.clocks.slowest

    def grant(self, state: DSSPState, worker: int) -> int:
        """Return the credit that brings this worker's push nearest one of the slowest's: the controller."""
        slowest = min(state.clocks.of, key=lambda w: (state.clocks.of[w], w))
        times, slowest_times = state.times[worker], state.times.get(slowest)
        if slowest_times is None:
            return 0
        max_credit = self.high - self.gap(state, worker) + 1
        interval, slowest_interval = times[1] - times[0], slowest_times[1] - slowest_times[0]
        slowest_pushes = [slowest_times[1] + (k + 1) * slowest_interval for k in range(max_credit + 1)]

        def distance(steps: int) -> float:
            return min(abs(times[1] + steps * interval - push) for push in slowest_pushes)

        return min(range(max_credit + 1), key=distance, default=0)


@dataclass(frozen=True, kw_only=True)
class DSSP(PushPull):
    """Strategy of SSP with a bound between `low` and `high`, chosen while running."""

    name = "dssp"
    summary = "SSP whose bound moves between `low` and `high` with the workers' measured speeds"

    low: Annotated[
        int, Whole("steps that a worker may always be ahead of the slowest", of="steps", at_least=0)
    ] = 3
    high: Annotated[int, Whole("steps that a worker may be ahead with credit", of="steps", at_least=0)] = 15

    def check(self) -> None:
        if self.low > self.high:
            raise SettingError(f"low={self.low!r}, high={self.high!r}: whole numbers, 0 ≤ low ≤ high")

    @property
    def slack(self) -> int:
        return self.low

    def rule(self) -> DynamicStaleness:
        return DynamicStaleness(self.low, self.high, ahead=int(self.overlaps))
