"""DSSP: dynamic stale-synchronous parallel (Zhao et al., 2019): SSP whose bound moves from `low` to `high`.

    on a push of p:  if p has credit, it spends one and continues
                     else if t_p − t_slowest ≤ low, it continues
                     else if p is the fastest, it asks the controller for credit, and continues if it gets any
                     else it waits until the gap is ≤ low
    controller:      from the two latest push times of p and of the slowest, predict the next pushes of both;
                     the credit r ≤ high − low is the one at which p's push lies nearest one of the slowest's

In the paper low = 3 and high − low = 12. Ours, where the rule leaves it open:
- Granted credit is spent by the push that asked for it, too: r is the push at which p should wait. If that
  push went on for free, p would wait one push later than predicted, and its gap reach high + 1.
- A worker that asks again, with a gap above low + 1, gets less, so that no gap exceeds `high`. Read to the
  letter, it may get high − low each time: then `high` bounds nothing.
- Ties: a worker that is held has the slowest's interval, and all credits are equally near but for rounding.
  The fewest counts whose push is nearest to within a hundredth of p's interval.
- The slowest: of the workers at the least clock the one whose push is predicted last, since p waits for all.

tests/support/dssp_reference.py is the rule once more, without a server; both go on at the same moments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from offbeat.core.fields import Whole
from offbeat.errors import SettingError
from offbeat.server.messages import Push
from offbeat.server.rule import Clocks, Rule
from offbeat.strategies.push_pull import PushPull

TOLERANCE = 0.01  # of a worker's step: a credit more must bring its push nearer by more than that


@dataclass
class DSSPState:
    """Clocks, the two latest push times and the credit of each worker."""

    clocks: Clocks = field(default_factory=Clocks)
    times: dict[int, tuple[float, float]] = field(default_factory=dict)
    credit: dict[int, int] = field(default_factory=dict)
    free: set[int] = field(default_factory=set)  # workers that have spent credit, and may continue
    untimed: set[int] = field(default_factory=set)  # members that have not pushed yet


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
        if worker not in state.times:
            state.untimed.add(worker)
        return state.clocks.join(worker, clock)

    def leave(self, state: DSSPState, worker: int) -> None:
        state.clocks.of.pop(worker, None)
        state.times.pop(worker, None)
        state.credit.pop(worker, None)
        state.free.discard(worker)
        state.untimed.discard(worker)

    def advance(self, state: DSSPState, push: Push) -> None:
        worker, clocks = push.worker, state.clocks
        clocks.of[worker] = push.clock
        state.untimed.discard(worker)
        state.times[worker] = (state.times.get(worker, (push.at_s, push.at_s))[1], push.at_s)
        state.free.discard(worker)
        if self.gap(state, worker) <= self.low:
            if state.credit.get(worker):
                state.credit[worker] -= 1
            return
        if not state.credit.get(worker) and clocks.of[worker] == clocks.of.greatest:
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
        clocks, max_credit = state.clocks, self.high - self.gap(state, worker) + 1
        untimed = state.untimed - state.times.keys()
        if max_credit < 1 or any(clocks.of[other] == clocks.slowest for other in untimed):
            return 0
        behind = [state.times[w] for w, clock in clocks.of.items() if clock == clocks.slowest]
        # of each the next push, and the interval to the one after it; the last to push is the slowest
        first, slowest_interval = max((2 * last - before, last - before) for before, last in behind)
        slowest_pushes = [first + k * slowest_interval for k in range(max_credit + 1)]
        before, last = state.times[worker]

        def distance(steps: int) -> float:
            return min(abs(last + steps * (last - before) - push) for push in slowest_pushes)

        distances = [distance(steps) for steps in range(max_credit + 1)]
        near = min(distances) + TOLERANCE * (last - before)
        return next(credit for credit, distance in enumerate(distances) if distance <= near)


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
