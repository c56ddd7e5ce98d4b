"""Oscars: adaptive semi-synchronous training with a global view, after an idea of Huang (2021).

Only the abstract was available: semi-synchronous training on local SGD, for clusters whose machines differ.
All below is our reconstruction [ours]: no figure measured with it is Oscars' own.

    server   plan a round:  T = max(τ t, busy/(1 − busy) c);  H_i = clamp(⌊(T − c_i + c̃)/t_i⌋, 1, H_max)
    worker   pull (w_r, H_i);  H_i local steps;  push δ_i = w_i − w_r, with its samples, t_i, c_i, loss
    server   when all have pushed, or at the deadline (1+ε)(T + c̃):  w ← w_r + Σ p_i δ_i,  p_i by samples
             a push that is late by a ≤ s_max rounds counts with 1/(1+a) of its weight in the round in which
             it arrives; an older one is dropped. Either way its worker reads the next round's weights
    τ        "fixed";  "lengthen": τ_r = ⌈(L_0/L_r)^(1/3) τ_0⌉;  "shorten": τ_r = ⌈(L_r/L_0)^(1/3) τ_0⌉

t_i: seconds of computing per local step, the median of a round's: in a loop in which workers wait for each
other, to log a mean, say, a mean would make every round longer than the last. c_i: seconds per exchange,
taken as twice those of a push, since a pull's transfer cannot be distinguished from waiting. Both are running
means, measured by the worker without its first steps. t, c: a high quantile of them; c̃: the median of c_i.
H_max: `limit`·T/t, at least 1. ε: `patience`. s_max: `lateness`.
Samples: local steps, unless the loop counts samples.

    slack      H is computed with a T that is a twentieth longer: all wait a little, and fast workers do one
               step more
    busy       the fraction of a round that is to be computing: on slow links rounds are longer, however
               small τ is
    rounds     wait for the members that were given their weights. A new worker does one step, then, at once,
               as many as still fit into the round; no worker waits for these. Then it does as many as the
               slowest, until it is timed; one in the place of a lost worker as many as that one did. Where no
               worker is timed yet, a round has no deadline, and waits for all members
    deadline   counts from when the workers that push began, as they tell: they may have waited for another
               shard, whose rounds are out of phase. It ends a round only if one that was given the round's
               weights has pushed. If only late workers have, the round ends T later: they do the steps that
               were left when they pushed, and the next round waits for those who are missing, too. So all
               are in phase again, even in a loop in which workers wait for each other
    slowed     a worker whose steps have become slower pushes 1+ε times the planned seconds after the round
               began: so it is only a little late, and the next plan knows its speed
    normalise  as FedNova: Σ p_i (δ_i/H_i) · Σ p_i H_i. Where data differ, unequal H_i move the optimum; this
               corrects it. p_i is then by samples per step: by samples of the round it would count the steps
               once more, and undo half of the correction
    weighted   False: all p_i are equal
    L_0        the greatest first loss that a worker reports: a new worker's is of a trained model

The server's half is in rule.py.

With τ = 1 and equal speeds every H_i is 1, and under plain SGD this is BSP.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median_low
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from offbeat.core.blocks import Layout
from offbeat.core.fields import Choice, Flag, Number, Whole
from offbeat.core.port import Port
from offbeat.core.replica import Replica
from offbeat.core.strategy import Strategy
from offbeat.server.half import ServerHalf
from offbeat.strategies.oscars.round_plan import SLACK
from offbeat.strategies.oscars.rule import SCHEDULES, RoundRule, Rounds, RoundSettings

UNTIMED = 2  # first steps, which are not timed


@dataclass
class OscarsState:
    """A worker's position in its round, and its own speed as measured."""

    base: list[Tensor]  # the pulled weights; during a push, the worker's change to them
    clock: int = 0
    planned: int = 1
    steps: int = 0  # local steps done in this round
    times_s: list[float] = field(default_factory=list)  # seconds of computing of this round's timed steps
    total: int = 0  # steps so far
    computed_s: float = 0.0  # seconds of computing so far
    step_s: float = 0.0  # running mean of seconds per step; 0: not known yet
    exchange_s: float = 0.0  # running mean of seconds per exchange
    first_loss: float = 0.0
    has_base: bool = field(default=False, metadata={"saved": False})  # or the first step has not begun


@dataclass(frozen=True, kw_only=True)
class Oscars(Strategy[OscarsState]):
    """Strategy of rounds in which every worker does as many local steps as fit until the others arrive."""

    name = "oscars"
    summary = "rounds in which each worker does as many local steps as fit until the others arrive"
    refused: ClassVar[Mapping[str, str]] = {"codec": "its exchanges must be lossless"}

    tau: Annotated[int, Whole("local steps of a round, on average", at_least=1)] = 4
    schedule: Annotated[str, Choice("how tau follows the loss", of=SCHEDULES)] = "fixed"
    busy: Annotated[
        float,
        Number(
            "fraction of a round to spend computing",
            noun="a number, the fraction of a round,",
            at_least=0,
            below=1,
        ),
    ] = 0.0
    limit: Annotated[
        float,
        Number(
            "maximum of a worker's local steps, as a multiple of tau",
            noun="a number, times tau,",
            above=0,
        ),
    ] = 4.0
    quantile: Annotated[
        float, Number("quantile of the workers' times that plans use", noun="a number,", above=0, at_most=1)
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
    weighted: Annotated[bool, Flag("weight each worker by its samples; normalised: by samples per step")] = (
        True
    )
    normalise: Annotated[bool, Flag("divide each update by its local steps, as FedNova does")] = False

    def server_half(self) -> ServerHalf:
        rounds = RoundSettings(
            tau=self.tau,
            schedule=self.schedule,
            busy=self.busy,
            limit=self.limit,
            quantile=self.quantile,
            patience=self.patience,
            lateness=self.lateness,
            weighted=self.weighted,
            normalise=self.normalise,
        )
        return ServerHalf(rule=RoundRule(rounds), aggregation=Rounds, in_step=False)

    @property
    def _uses_loss(self) -> bool:
        return self.schedule != "fixed"

    def layout(self, model: nn.Module) -> Layout:
        return Layout.default(model, keeps_loaded=False)

    def init(self, replica: Replica) -> OscarsState:
        if self._uses_loss:
            replica.inputs.record_losses()
        return OscarsState([torch.empty_like(weight) for weight in replica.weights])

    async def step(self, state: OscarsState, replica: Replica, port: Port) -> None:
        if not state.total and not state.has_base:  # an optimizer may move the weights, and begin again
            torch._foreach_copy_(state.base, replica.weights)
            state.has_base = True
        await replica.update()
        self._count_step(state, port)
        over = state.steps >= state.planned or self._is_over(state)
        if replica.members.count > 1:  # one that has been slow decides for all
            over = bool(*await replica.members.agree_on(float(over)))
        if over:
            await self._exchange(state, replica, port)
        port.record(planned_steps=state.planned)

    async def _exchange(self, state: OscarsState, replica: Replica, port: Port) -> None:
        for base, weight in zip(state.base, replica.weights, strict=True):
            torch.sub(weight, base, out=base)
        if self.normalise:
            torch._foreach_mul_(state.base, 1 / state.steps)
        report = await self._report(state, replica)
        state.clock += 1
        before_s = port.usage().communicate_s
        pushed = port.server.push(state.base, state.clock, report=report)
        pulled = port.server.pull(replica.weights, state.clock)
        await pushed
        if state.clock > 1:  # the first may have waited for all workers to join
            exchange_s = 2 * (port.usage().communicate_s - before_s)
            state.exchange_s = self._smoothed(state.exchange_s, exchange_s)
        (planned,) = await replica.members.agree_on((await pulled).hint)
        state.planned = max(1, int(planned))
        state.steps, state.times_s = 0, []
        torch._foreach_copy_(state.base, replica.weights)

    async def _report(self, state: OscarsState, replica: Replica) -> tuple[float, ...]:
        if (
            state.times_s
        ):  # the loop itself may have waited for other workers in a step: a mean would count it
            state.step_s = self._smoothed(state.step_s, median_low(state.times_s))
        samples = replica.inputs.take_samples() if replica.inputs.samples else state.steps
        loss = replica.inputs.take_loss() if self._uses_loss else 0.0
        if replica.members.count > 1:
            samples, loss = (await replica.members.total(replica.members.vector(samples, loss))).tolist()
            loss /= replica.members.count
            step_s, exchange_s = await replica.members.agree_on(state.step_s, state.exchange_s)
            state.step_s, state.exchange_s = step_s, exchange_s
        loss = loss if math.isfinite(loss) else 0.0
        state.first_loss = state.first_loss or loss
        return samples, state.steps, state.step_s, state.exchange_s, loss, state.first_loss

    def _count_step(self, state: OscarsState, port: Port) -> None:
        """Count a local step, and the seconds that it took."""
        before_s, state.computed_s = state.computed_s, port.usage().compute_s
        state.steps += 1
        state.total += 1
        if state.total > UNTIMED and state.computed_s >= before_s:  # a resumed run counts from 0
            state.times_s.append(state.computed_s - before_s)

    def _is_over(self, state: OscarsState) -> bool:
        """Return whether one more step would exceed the planned time of the round, patience included."""
        if not state.times_s or not state.step_s:
            return False
        next_s = sum(state.times_s) * (1 + 1 / len(state.times_s))
        return next_s > (1 + self.patience + SLACK) * state.planned * state.step_s

    def _smoothed(self, known: float, new: float) -> float:
        return known + self.belief * (new - known) if known else new

    async def publish(self, state: OscarsState, replica: Replica, port: Port) -> list[Tensor]:
        weights = [torch.empty_like(weight) for weight in replica.weights]
        await port.server.read(weights)
        return weights
