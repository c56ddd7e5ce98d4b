"""The server's half of Oscars: rounds that wait for timed workers, and end by a deadline.

`RoundRule` admits a worker that has pushed once the next round has begun. `Rounds` weights the pushes of a
round, ends it when all awaited workers have pulled, or at its deadline, and plans the next one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from offbeat.server.aggregation import WeightedRounds
from offbeat.server.messages import Push, Tensors
from offbeat.server.rule import Clocks, Rule
from offbeat.strategies.oscars.round_plan import RoundPlan, WorkerPace, plan_round

SCHEDULES = ("fixed", "lengthen", "shorten")


@dataclass(frozen=True, kw_only=True)
class RoundSettings:
    """The settings of Oscars that the server needs."""

    tau: int
    schedule: str
    busy: float
    limit: float
    quantile: float
    patience: float
    lateness: int
    weighted: bool
    normalise: bool

    def tau_at(self, first_loss: float, loss: float) -> int:
        """Return τ_r by the schedule, where losses are known and positive."""
        if self.schedule == "fixed" or not (first_loss > 0 and loss > 0):
            return self.tau
        ratio = first_loss / loss if self.schedule == "lengthen" else loss / first_loss
        return max(1, math.ceil(math.cbrt(ratio) * self.tau - 1e-9))

    def weight_of(self, samples: float, steps: float) -> float:
        """Return a worker's weight in the mean; where updates are normalised, steps must not count again."""
        if not self.weighted:
            return 1.0
        return max(samples, 1.0) / (max(steps, 1.0) if self.normalise else 1.0)


@dataclass
class RoundTotals:
    """Sums over a round's pushes so far, by weight."""

    weight: float = 0.0
    steps: float = 0.0
    loss: float = 0.0
    loss_weight: float = 0.0  # of the pushes that reported a loss
    oldest: int = 0  # rounds by which the latest push was late


@dataclass
class RoundState:
    """The server's view of all workers and of the round in progress."""

    tau: int
    clocks: Clocks = field(default_factory=Clocks)
    number: int = 0  # of the round
    now_s: float = 0.0
    began_s: float = 0.0  # when the round began
    deadline_s: float = math.inf  # from which on a round ends with those who have arrived
    plan: RoundPlan = field(default_factory=RoundPlan)
    awaited: set[int] = field(default_factory=set)  # workers that were given this round's weights
    arrived: dict[int, float] = field(default_factory=dict)  # when each pushed that waits for the next round
    pulling: set[int] = field(default_factory=set)  # workers in `arrived` that have pulled
    totals: RoundTotals | None = None
    round_of: dict[int, int] = field(default_factory=dict)  # the round whose weights each worker has
    new: set[int] = field(default_factory=set)  # workers that have not been given a plan yet
    left: dict[int, int] = field(default_factory=dict)  # steps of workers that began in mid-round
    paces: dict[int, WorkerPace] = field(default_factory=dict)
    first_loss: float = 0.0
    staleness: int = 0  # rounds by which the latest push was late, of those that were applied last

    @property
    def limit_s(self) -> float:
        """The time from which on a round ends although all who were given its weights are missing."""
        return self.deadline_s + self.plan.length_s

    @property
    def is_over(self) -> bool:
        """True if the round ends now; at its deadline only if one who was given its weights has come."""
        if self.awaited <= self.pulling or self.now_s >= self.limit_s:
            return True
        return self.now_s >= self.deadline_s and not self.awaited.isdisjoint(self.arrived)

    def steps_of(self, worker: int) -> int:
        """Return the planned steps of a worker; one that has not been timed is taken for the slowest."""
        return self.plan.steps.get(worker) or self.plan.fewest

    def steps_left(self, worker: int) -> float:
        """Return how many steps of a worker fitted into the round when its push came; 0: none is planned."""
        if not self.plan.length_s or worker not in self.arrived:
            return 0.0
        passed = (self.arrived[worker] - self.began_s) / self.plan.length_s
        return self.steps_of(worker) * (1 - passed)


@dataclass(frozen=True)
class RoundRule(Rule[RoundState]):
    """Rule that admits workers that have pushed when the next round begins."""

    settings: RoundSettings

    def init(self) -> RoundState:
        return RoundState(tau=self.settings.tau)

    def members(self, state: RoundState) -> list[int]:
        return list(state.clocks.of)

    def join(self, state: RoundState, worker: int, clock: int | None) -> int:
        if clock is None:
            state.new.add(worker)
            state.round_of[worker] = state.number
        has_weights = clock is not None and state.round_of.setdefault(worker, state.number) == state.number
        if has_weights or state.deadline_s == math.inf:
            state.awaited.add(worker)
        return state.clocks.join(worker, clock)

    def leave(self, state: RoundState, worker: int) -> None:
        state.clocks.of.pop(worker, None)
        state.arrived.pop(worker, None)
        for workers in (state.awaited, state.pulling, state.new):
            workers.discard(worker)

    def advance(self, state: RoundState, push: Push) -> None:
        worker = push.worker
        begins_late = worker in state.new and worker not in state.awaited
        if begins_late and state.steps_left(worker) >= 1:
            state.left[worker] = math.floor(state.steps_left(worker))
            state.arrived.pop(worker, None)  # it goes on at once, and may push again in this round
        elif worker in state.arrived:
            state.pulling.add(worker)
        state.new.discard(worker)

    def admits(self, state: RoundState, worker: int, clock: int) -> bool:
        return worker not in state.arrived

    def gate(self, state: RoundState) -> int:
        return state.number  # those who have arrived wait for the next round

    def staleness_of(self, state: RoundState, worker: int, clock: int | None) -> int:
        return 0 if clock is None else state.staleness

    def hint(self, state: RoundState, worker: int) -> int:
        """Return how many local steps the worker does next."""
        return state.left.get(worker) or state.steps_of(worker)


class Rounds(WeightedRounds[RoundState]):
    """Aggregation that weights pushes by samples and lateness, and applies their mean when a round ends."""

    rule: RoundRule
    report_size = 6  # samples, steps, seconds per step and per exchange, loss, first loss

    def weight(self, state: RoundState, push: Push) -> float:
        settings = self.rule.settings
        state.clocks.of[push.worker] = push.clock
        state.arrived[push.worker] = state.now_s
        totals = state.totals = state.totals or RoundTotals()
        if not push.finite:
            return 0.0
        samples, steps, step_s, exchange_s, loss, first_loss = push.report
        exchange_s = max(0.0, exchange_s)
        if step_s > 0:
            state.paces[push.worker] = WorkerPace(step_s, exchange_s)
        if push.worker in state.awaited:
            self._extend(state, began_s=state.now_s - push.spent_s - exchange_s)
        state.first_loss = max(state.first_loss, first_loss)
        age = state.number - state.round_of.get(push.worker, state.number)
        if age > settings.lateness:
            return 0.0
        weight = settings.weight_of(samples, steps) / (1 + age)
        totals.weight += weight
        totals.steps += weight * steps
        totals.loss += weight * loss
        totals.loss_weight += weight if loss else 0.0
        totals.oldest = max(totals.oldest, age)
        return weight

    def factor(self, state: RoundState) -> float:
        totals = state.totals
        normalised = self.rule.settings.normalise and totals is not None and totals.weight
        return totals.steps / totals.weight if totals is not None and normalised else 1.0

    def due(self, state: RoundState) -> float | None:
        # Wait until all have pulled, not just pushed: then all are answered at the same time.
        if state.totals is None or not state.is_over:
            return None
        factor = self.factor(state)
        settings, totals, state.totals = self.rule.settings, state.totals, None
        if totals.weight:
            state.staleness = totals.oldest
        if totals.loss_weight:
            state.tau = settings.tau_at(state.first_loss, totals.loss / totals.loss_weight)
        self._begin_round(state)
        return factor

    def weights_for(self, state: RoundState, worker: int | None) -> Tensors:
        if worker is not None:
            state.round_of[worker] = state.number  # one who has returned gets them in mid-round
        return super().weights_for(state, worker)

    def tick(self, state: RoundState, at_s: float) -> None:
        state.now_s = max(state.now_s, at_s)

    def wake_at(self, state: RoundState) -> float | None:
        later = (at_s for at_s in (state.deadline_s, state.limit_s) if state.now_s < at_s < math.inf)
        return min(later, default=None)

    def _begin_round(self, state: RoundState) -> None:
        settings = self.rule.settings
        missing = state.awaited if state.awaited.isdisjoint(state.arrived) else set()
        late = state.arrived if missing else {}  # in the middle of the others' rounds
        state.left = {worker: max(1, round(state.steps_left(worker))) for worker in late}
        state.number += 1
        state.awaited, state.arrived, state.pulling = set(state.arrived), {}, set()
        for worker in state.awaited:
            state.round_of[worker] = state.number
        state.awaited |= missing
        state.plan = plan_round(
            state.paces, state.clocks.of, state.tau, settings.quantile, settings.limit, settings.busy
        )
        state.began_s, state.deadline_s = state.now_s, self._deadline_s(state, state.now_s)
        if not state.plan.length_s:  # no deadline: shards that await different workers would be stuck
            state.awaited = set(state.clocks.of)

    def _extend(self, state: RoundState, began_s: float) -> None:
        """Move the deadline, if a worker began so late that it waited for another shard."""
        if began_s - state.began_s > self.rule.settings.patience * state.plan.length_s / 2:
            state.deadline_s = max(state.deadline_s, self._deadline_s(state, began_s))

    def _deadline_s(self, state: RoundState, began_s: float) -> float:
        """Return when a round that began then is to end."""
        return began_s + (1 + self.rule.settings.patience) * (state.plan.length_s or math.inf)
