"""DiLoCo on a server: rounds that end with a quorum of workers, or some seconds after the first one.

    worker   H local steps;  push Δ_i = w_r − w_i with its samples n_i;  pull, and go on from what comes
    server   Δ ← Σ n_i Δ_i / Σ n_i, over the pushes of the round
             the round ends when `quorum` workers have pushed that began with its weights, or `grace_s` after
             the first of them:   v ← μ v + Δ;   w ← w − η (Δ + μ v);   those workers get w
             a push for a round that is over counts in the one that is open, and its worker goes on at once

So nobody waits for all. A late push is never dropped: its work is in the next step of the server, by its
samples. How many rounds late it was is the staleness of the worker's next read, in metrics and summaries. A
late push alone ends no round, and does not count for the quorum: it says nothing about the round's weights.
So what comes after the last round of a training is in no weights.
A worker that leaves is not waited for; with fewer members than `quorum`, all of them are the quorum.

The ideas' (arXiv 2604.21428, 2401.09135 and 2506.04531, read in their abstracts): the outer optimizer at the
server, a quorum or a grace time, weights by tokens. Ours: everything else. Samples are local steps, unless
the loop counts samples.

With limits for outliers (guard.py) a worker reports n_i and s_i with its push, and when the round ends, the
server leaves the outliers among its pushes out. So it keeps the pushes of a round, a copy of the model each.

With `quorum=None`, no grace and equal samples it is DiLoCo, up to rounding. Each shard has rounds of its own:
where a push arrives at one shard in time and at another too late, it counts in two rounds, once in each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from offbeat.core.finite import is_finite
from offbeat.core.port import Port
from offbeat.core.replica import Replica
from offbeat.server.aggregation import NOT_FINITE, WeightedRounds, ack
from offbeat.server.apply import MakeApply
from offbeat.server.half import ServerHalf
from offbeat.server.messages import Answer, Push, PushAck, Tensors
from offbeat.server.rule import Clocks, Rule
from offbeat.server.sharding import ShardState
from offbeat.strategies.diloco.guard import ROWS, find_outliers, measure
from offbeat.strategies.diloco.settings import DiLoCoSettings, DiLoCoState

SAMPLES = 2  # the place of the samples in a report, after the outer learning rate and a mark


@dataclass
class QuorumState:
    """The server's view of the round that is open."""

    clocks: Clocks = field(default_factory=Clocks)
    number: int = 0  # of the round
    now_s: float = 0.0
    first_s: float = math.inf  # when the first worker of this round pushed
    round_of: dict[int, int] = field(default_factory=dict)  # the round whose weights each worker has
    arrived: set[int] = field(default_factory=set)  # workers of this round that have pushed
    pulling: set[int] = field(default_factory=set)  # those of them that have pulled
    lateness: dict[int, int] = field(default_factory=dict)  # rounds by which each worker's last push was late
    outliers: Counter[int] = field(default_factory=Counter)  # pushes that were left out, by worker


@dataclass(frozen=True)
class QuorumRule(Rule[QuorumState]):
    """Rule that admits the workers of a round when it ends, and late ones at once."""

    quorum: int | None  # None: all members
    grace_s: float | None  # None: no deadline
    outer_lr: float
    outlier_norm: float | None = None
    outlier_cosine: float | None = None

    def init(self) -> QuorumState:
        return QuorumState()

    def members(self, state: QuorumState) -> list[int]:
        return list(state.clocks.of)

    def join(self, state: QuorumState, worker: int, clock: int | None) -> int:
        if clock is None:
            state.round_of[worker] = state.number
        state.round_of.setdefault(worker, state.number)
        return state.clocks.join(worker, clock)

    def leave(self, state: QuorumState, worker: int) -> None:
        state.clocks.of.pop(worker, None)
        state.arrived.discard(worker)
        state.pulling.discard(worker)

    def advance(self, state: QuorumState, push: Push) -> None:
        if push.worker in state.arrived:
            state.pulling.add(push.worker)

    def admits(self, state: QuorumState, worker: int, clock: int) -> bool:
        return worker not in state.arrived

    def gate(self, state: QuorumState) -> int:
        return state.number  # those who have arrived wait for the next round

    def staleness_of(self, state: QuorumState, worker: int, clock: int | None) -> int:
        return 0 if clock is None else state.lateness.get(worker, 0)

    def hint(self, state: QuorumState, worker: int) -> int:
        """Return how many of the worker's pushes were left out as outliers."""
        return state.outliers[worker]

    def is_over(self, state: QuorumState) -> bool:
        """Return whether the round is over: enough workers have pushed and pulled, or it is time."""
        if not state.arrived:
            return False
        members = len(state.clocks.of)
        enough = members if self.quorum is None else min(self.quorum, members)
        return len(state.pulling) >= enough or state.now_s >= self.deadline_s(state)

    def deadline_s(self, state: QuorumState) -> float:
        return math.inf if self.grace_s is None else state.first_s + self.grace_s


class QuorumRounds(WeightedRounds[QuorumState]):
    """Aggregation that steps the outer optimizer with the mean of a round's pushes, weighted by samples."""

    rule: QuorumRule
    report_size = 1  # samples; before them come the outer learning rate, and a mark

    @property
    def can_be_followed(self) -> bool:
        return False  # a copy would have to know which pushes the outer optimizer has not seen yet

    def weight(self, state: QuorumState, push: Push) -> float:
        state.clocks.of[push.worker] = push.clock
        late = state.number - state.round_of.get(push.worker, state.number)
        state.lateness[push.worker] = late
        if not late:
            state.arrived.add(push.worker)
            state.first_s = min(state.first_s, push.at_s)
        return max(push.report[SAMPLES], 1.0) if push.finite else 0.0

    def due(self, state: QuorumState) -> float | None:
        if not self.rule.is_over(state):
            return None
        state.number += 1
        state.first_s = math.inf
        for worker in state.arrived:
            state.round_of[worker] = state.number
        state.arrived, state.pulling = set(), set()
        return 1.0

    def after(self, state: QuorumState) -> list[Answer]:
        if self.due(state) is not None and (mean := self._gathered.take()):
            self.apply(
                self.shard.weights, Push(worker=-1, clock=0, update=mean, report=(self.rule.outer_lr, 1.0))
            )
        return []

    def weights_for(self, state: QuorumState, worker: int | None) -> Tensors:
        if worker is not None:
            state.round_of[worker] = state.number  # a late one gets them in the middle of a round
        return super().weights_for(state, worker)

    def tick(self, state: QuorumState, at_s: float) -> None:
        state.now_s = max(state.now_s, at_s)

    def wake_at(self, state: QuorumState) -> float | None:
        deadline_s = self.rule.deadline_s(state)
        return deadline_s if state.now_s < deadline_s < math.inf else None


class GuardedRounds(QuorumRounds):
    """Aggregation that keeps the pushes of a round, and leaves the outliers among them out when it ends."""

    report_size = 1 + 1 + ROWS  # samples, the norm of the whole change, and its sketch

    def __init__(self, shard: ShardState, rule: QuorumRule, make_apply: MakeApply) -> None:
        super().__init__(shard, rule, make_apply)
        self._kept: list[tuple[Push, float]] = []  # with their weights

    @property
    def pending(self) -> Mapping[int, int]:
        return Counter(push.worker for push, _ in self._kept)

    def push(self, state: QuorumState, push: Push) -> list[PushAck]:
        weight = self.weight(state, push)
        if not push.finite:
            return [ack(push, NOT_FINITE)]
        self._kept.append((replace(push, update=[part.clone() for part in push.update]), weight))
        return [ack(push)]

    def due(self, state: QuorumState) -> float | None:
        factor = super().due(state)
        if factor is not None:
            reports = [push.report[SAMPLES + 1 :] for push, _ in self._kept]
            norms, sketches = [report[0] for report in reports], [report[1:] for report in reports]
            out = find_outliers(norms, sketches, self.rule.outlier_norm, self.rule.outlier_cosine)
            for number, (push, weight) in enumerate(self._kept):
                if number in out:
                    state.outliers[push.worker] += 1
                else:
                    self._gathered.add(push, weight)
            self._kept = []
        return factor

    def restart(self, state: QuorumState) -> None:
        super().restart(state)
        self._kept = []


def server_half_of(settings: DiLoCoSettings) -> ServerHalf:
    """Return the server's half: its rule, and its outer optimizer."""
    mu = settings.outer_momentum
    return ServerHalf(
        rule=QuorumRule(
            settings.quorum,
            settings.grace_s,
            settings.outer_lr,
            settings.outlier_norm,
            settings.outlier_cosine,
        ),
        aggregation=GuardedRounds if settings.guards else QuorumRounds,
        in_step=settings.quorum is None and settings.grace_s is None,
        outer_sgd={"lr": settings.outer_lr, "momentum": mu, "nesterov": mu > 0},
    )


async def step_with_server(
    settings: DiLoCoSettings, state: DiLoCoState, replica: Replica, port: Port
) -> None:
    """Run one step of a worker; `state.own.start` holds the weights that the round began with."""
    start = state.own.start
    if not start:
        state.own.allocate(replica.weights, momentum=False)
        start = state.own.start
    await replica.update()
    state.step += 1
    if state.step % settings.period:
        return
    measured = torch.zeros(1 + ROWS if settings.guards else 0, dtype=torch.float64, device=start[0].device)
    if settings.guards:
        measure(replica.weights, start, measured)
    for base, weight in zip(start, replica.weights, strict=True):
        torch.sub(base, weight, out=base)
    samples = replica.inputs.take_samples() if replica.inputs.samples else settings.period
    if replica.members.count > 1:  # if one member's part is refused, all members' must be
        (samples,) = (await replica.members.total(replica.members.vector(samples))).tolist()
        (bad,) = await replica.members.agree_on(float(not is_finite(start)))
        if bad:
            torch._foreach_mul_(start, math.nan)
    clock = state.step // settings.period
    pushed = port.server.push(start, clock, report=(settings.outer_lr, 1.0, samples, *measured.tolist()))
    pulled = port.server.pull(replica.weights, clock)
    await pushed
    outliers = (await pulled).hint
    if settings.guards:
        port.record(outliers=outliers)
    torch._foreach_copy_(start, replica.weights)
