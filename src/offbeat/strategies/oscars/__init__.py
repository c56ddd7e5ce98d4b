"""Oscars: adaptive semi-synchronous training with a global view, after an idea of Huang (2021).

Only the abstract was to be had: semi-synchronous training on local SGD, for clusters whose machines differ.
All below is our reconstruction [ours]: no figure made with it is Oscars'.

    server   plan a round:  T = max(τ t, busy/(1 − busy) c);  H_i = clamp(⌊(T − c_i + c_min)/t_i⌋, 1, H_max)
    worker   pull (w_r, H_i);  H_i local steps;  push δ_i = w_i − w_r, with its samples, t_i, c_i, loss
    server   when all have pushed, or at the deadline (1+ε)(T + c_min):  w ← w_r + Σ p_i δ_i,  p_i by samples
             a push that is late by a ≤ s_max rounds counts with 1/(1+a) of its weight in the round in which
             it comes; an older one is dropped. Either way its worker reads the next round's weights
    τ        "fixed";  "lengthen": τ_r = ⌈(L_0/L_r)^(1/3) τ_0⌉;  "shorten": τ_r = ⌈(L_r/L_0)^(1/3) τ_0⌉

t_i: seconds of computing a local step; c_i: of an exchange, taken as twice those of a push, since a pull's
cannot be told from waiting. Both are running means, kept by the worker; its first steps are left out.
t, c: a high quantile of them. H_max: `limit`·T/t, at least 1. ε: `patience`. s_max: `lateness`. Samples:
local steps, unless the loop tells.

    slack      T is taken a twentieth longer for H: all wait a little, and fast workers do a step more
    busy       the part of a round that is to be computing: on slow links rounds are longer, however small τ
    rounds     wait for those who were given their weights and are here. A newcomer does one step a round
               until it is timed, and nobody waits for its first; but where nobody is timed yet a round has
               no deadline, and waits for all who are here. A round that nobody has come to by its deadline
               ends with the first who comes
    slowed     a worker whose steps have become slower pushes when the planned ones should have been done,
               and ε of them: so it is late by little, and the next plan knows
    normalise  as FedNova: Σ p_i (δ_i/H_i) · Σ p_i H_i. Where data differ, unequal H_i move the optimum; this
               takes that back. With `weighted=False` all p_i are equal
    L_0        the greatest first loss that a worker tells: a newcomer's is of a model that has been trained

With τ = 1 and equal speeds every H_i is 1, and under plain SGD this is BSP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from offbeat.core.fields import Choice, Flag, Number, Whole
from offbeat.core.port import Port
from offbeat.core.replica import Replica
from offbeat.core.strategy import Strategy
from offbeat.server.messages import Push
from offbeat.server.rule import Clocks, Rule
from offbeat.strategies.oscars.round_plan import SLACK, RoundPlan, WorkerPace, plan

SCHEDULES = ("fixed", "lengthen", "shorten")
LEFT_OUT = 2  # first steps that are not timed


@dataclass
class RoundTotals:
    """What a round has got so far, as sums by weight."""

    weight: float = 0.0
    steps: float = 0.0
    loss: float = 0.0
    told: float = 0.0  # the weight of those who told their loss
    oldest: int = 0  # how late the latest of them was


@dataclass
class RoundState:
    """The server's view of all workers."""

    tau: int
    clocks: Clocks = field(default_factory=Clocks)
    number: int = 0  # of the round
    now_s: float = 0.0
    deadline_s: float = math.inf
    plan: RoundPlan = field(default_factory=RoundPlan)
    awaited: set[int] = field(default_factory=set)  # were given this round's weights
    arrived: set[int] = field(default_factory=set)  # have pushed, and are to wait for the next round's
    asking: set[int] = field(default_factory=set)  # of those: have asked for them
    came: RoundTotals | None = None
    holds: dict[int, int] = field(default_factory=dict)  # the round whose weights each worker has
    paces: dict[int, WorkerPace] = field(default_factory=dict)
    first_loss: float = 0.0
    behind: int = 0  # how late the latest push in the weights was, of those that came in last


@dataclass(frozen=True)
class RoundRule(Rule[RoundState]):
    oscars: Oscars
    report = 6

    def init(self) -> RoundState:
        return RoundState(tau=self.oscars.tau)

    def members(self, state: RoundState) -> list[int]:
        return list(state.clocks.of)

    def join(self, state: RoundState, worker: int, clock: int | None) -> int:
        if clock is None:
            state.paces.pop(worker, None)
            state.holds[worker] = state.number
        known = clock is not None and state.holds.setdefault(worker, state.number) == state.number
        if known or state.deadline_s == math.inf:
            state.awaited.add(worker)
        return state.clocks.join(worker, clock)

    def leave(self, state: RoundState, worker: int) -> None:
        state.clocks.of.pop(worker, None)
        for some in (state.awaited, state.arrived, state.asking):
            some.discard(worker)

    def weight(self, state: RoundState, push: Push) -> float:
        state.clocks.of[push.worker] = push.clock
        state.arrived.add(push.worker)
        came = state.came = state.came or RoundTotals()
        if not push.finite:
            return 0.0
        samples, steps, step_s, exchange_s, loss, first_loss = push.report
        if step_s > 0:
            state.paces[push.worker] = WorkerPace(step_s, max(0.0, exchange_s))
        state.first_loss = max(state.first_loss, first_loss)
        age = state.number - state.holds.get(push.worker, state.number)
        if age > self.oscars.lateness:
            return 0.0
        weight = max(samples, 1.0) / (1 + age) if self.oscars.weighted else 1 / (1 + age)
        came.weight += weight
        came.steps += weight * steps
        came.loss += weight * loss
        came.told += weight if loss else 0.0
        came.oldest = max(came.oldest, age)
        return weight

    def due(self, state: RoundState) -> float | None:
        # Once all have asked, not just pushed: then all are answered at the same time.
        if state.came is None or not (state.awaited <= state.asking or state.now_s >= state.deadline_s):
            return None
        came, state.came = state.came, None
        factor = came.steps / came.weight if self.oscars.normalise and came.weight else 1.0
        if came.weight:
            state.behind = came.oldest
        if came.told:
            state.tau = self.oscars.tau_at(state.first_loss, came.loss / came.told)
        self._begin(state)
        return factor

    def _begin(self, state: RoundState) -> None:
        state.number += 1
        state.awaited, state.arrived, state.asking = state.arrived, set(), set()
        for worker in state.awaited:
            state.holds[worker] = state.number
        oscars = self.oscars
        state.plan = plan(state.paces, state.clocks.of, state.tau, oscars.quantile, oscars.limit, oscars.busy)
        length_s = state.plan.length_s or math.inf
        state.deadline_s = state.now_s + (1 + oscars.patience) * length_s
        if length_s == math.inf:  # nothing else ends it: shards that await different workers would be stuck
            state.awaited = set(state.clocks.of)

    def advance(self, state: RoundState, push: Push) -> None:
        if push.worker in state.arrived:
            state.asking.add(push.worker)

    def admits(self, state: RoundState, worker: int, clock: int) -> bool:
        return worker not in state.arrived

    def staleness_of(self, state: RoundState, worker: int, clock: int | None) -> int:
        return 0 if clock is None else state.behind

    def hint(self, state: RoundState, worker: int) -> int:
        return state.plan.steps.get(worker, 1)

    def tick(self, state: RoundState, at_s: float) -> None:
        state.now_s = max(state.now_s, at_s)

    def wake_at(self, state: RoundState) -> float | None:
        return state.deadline_s if state.now_s < state.deadline_s < math.inf else None


@dataclass
class OscarsState:
    """Where a worker stands in its round, and what it knows of its own speed."""

    base: list[Tensor]  # what it pulled; on its way to the server, what it has made of it
    clock: int = 0
    planned: int = 1
    steps: int = 0  # of this round
    elapsed_s: float = 0.0  # computing, in this round
    timed: int = 0  # steps in that
    total: int = 0  # steps so far
    computed_s: float = 0.0  # so far
    step_s: float = 0.0  # 0: not known yet
    exchange_s: float = 0.0
    first_loss: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Oscars(Strategy[OscarsState]):
    """As many local steps for every worker as fit until the others arrive."""

    name = "oscars"
    summary = "rounds in which each worker does as many local steps as fit until the others arrive"

    tau: Annotated[int, Whole("local steps of a round, on average", at_least=1)] = 4
    schedule: Annotated[str, Choice("how tau follows the loss", of=SCHEDULES)] = "fixed"
    busy: Annotated[
        float,
        Number(
            "fraction of a round that is to be computing",
            noun="a number, the fraction of a round,",
            at_least=0,
            below=1,
        ),
    ] = 0.0
    limit: Annotated[
        float,
        Number(
            "most local steps of a worker, as a multiple of tau",
            noun="a number, times tau,",
            above=0,
        ),
    ] = 4.0
    quantile: Annotated[
        float, Number("quantile of the workers' times that plans go by", noun="a number,", above=0, at_most=1)
    ] = 0.9
    patience: Annotated[
        float,
        Number(
            "fraction of a round by which the deadline is later than planned",
            noun="a number, the fraction of a round",
            at_least=0,
        ),
    ] = 0.2
    lateness: Annotated[int, Whole("rounds by which a push may be late and still count", at_least=0)] = 2
    belief: Annotated[
        float,
        Number("weight of a new measurement in the running means", noun="a number,", above=0, at_most=1),
    ] = 0.3
    weighted: Annotated[bool, Flag("weight each worker by its samples")] = True
    normalise: Annotated[bool, Flag("divide each update by its local steps, as FedNova does")] = False

    def rule(self) -> RoundRule:
        return RoundRule(self)

    def tau_at(self, first_loss: float, loss: float) -> int:
        """τ_r, where losses are known and positive."""
        if self.schedule == "fixed" or not (first_loss > 0 and loss > 0):
            return self.tau
        ratio = first_loss / loss if self.schedule == "lengthen" else loss / first_loss
        return max(1, math.ceil(math.cbrt(ratio) * self.tau - 1e-9))

    @property
    def _uses_loss(self) -> bool:
        return self.schedule != "fixed"

    def init(self, replica: Replica) -> OscarsState:
        if self._uses_loss:
            replica.inputs.keep_losses()
        return OscarsState([torch.empty_like(weight) for weight in replica.weights])

    async def step(self, state: OscarsState, replica: Replica, port: Port) -> None:
        if not state.total:
            torch._foreach_copy_(state.base, replica.weights)
        await replica.update()
        self._time(state, port)
        if state.steps >= state.planned or self._is_over(state):
            await self._exchange(state, replica, port)
        port.record(planned_steps=state.planned)

    async def _exchange(self, state: OscarsState, replica: Replica, port: Port) -> None:
        for base, weight in zip(state.base, replica.weights, strict=True):
            torch.sub(weight, base, out=base)
        if self.normalise:
            torch._foreach_mul_(state.base, 1 / state.steps)
        report = self._figures(state, replica)
        state.clock += 1
        before_s = port.usage().communicate_s
        pushed = port.push(state.base, state.clock, report)
        pulled = port.pull(replica.weights, state.clock)
        await pushed
        if state.clock > 1:  # the first may have waited for all workers to come
            exchange_s = 2 * (port.usage().communicate_s - before_s)
            state.exchange_s = self._believed(state.exchange_s, exchange_s)
        state.planned = max(1, (await pulled).hint)
        state.steps = state.timed = 0
        state.elapsed_s = 0.0
        torch._foreach_copy_(state.base, replica.weights)

    def _figures(self, state: OscarsState, replica: Replica) -> tuple[float, ...]:
        if state.timed:
            state.step_s = self._believed(state.step_s, state.elapsed_s / state.timed)
        samples = replica.inputs.take_samples() if replica.inputs.samples else state.steps
        loss = replica.inputs.take_loss() if self._uses_loss else 0.0
        loss = loss if math.isfinite(loss) else 0.0
        state.first_loss = state.first_loss or loss
        return samples, state.steps, state.step_s, state.exchange_s, loss, state.first_loss

    def _time(self, state: OscarsState, port: Port) -> None:
        """A local step has been done."""
        before_s, state.computed_s = state.computed_s, port.usage().compute_s
        state.steps += 1
        state.total += 1
        if state.total > LEFT_OUT and state.computed_s >= before_s:  # a run that was resumed counts anew
            state.elapsed_s += state.computed_s - before_s
            state.timed += 1

    def _is_over(self, state: OscarsState) -> bool:
        """Whether one more step would end after all that were planned should have ended, and then some."""
        if not state.timed or not state.step_s:
            return False
        next_s = state.elapsed_s * (1 + 1 / state.timed)
        return next_s > (1 + self.patience + SLACK) * state.planned * state.step_s

    def _believed(self, known: float, new: float) -> float:
        return known + self.belief * (new - known) if known else new

    async def publish(self, state: OscarsState, replica: Replica, port: Port) -> None:
        await port.pull(replica.weights, None)
