"""Aggregations: when do pushes become part of the weights? No clock, no thread, no socket.

Immediate        every push at once
Barrier          the mean of all workers' pushes, once all have arrived; only then are they acknowledged
WeightedRounds   the weighted mean of a round's pushes, when the round ends
ReduceOnly       never: the server reduces tensors for workers that hold the weights themselves

Time is data: an aggregation that needs it asks to be woken.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar, Generic, TypeVar

import torch

from offbeat.errors import OffbeatError
from offbeat.server.apply import MakeApply, ServerOptimizer
from offbeat.server.journal import Effect, EffectKind, Journal, no_journal
from offbeat.server.messages import Answer, Push, PushAck, Reduce, Tensors
from offbeat.server.reduction import ServerReduce
from offbeat.server.rule import Rule
from offbeat.server.sharding import ShardState

G = TypeVar("G")
NOT_FINITE = "is not finite"
TOO_LATE = "arrived too late"
FENCED = "arrived after others had trained on without this worker"
REFUSALS = ("", NOT_FINITE, TOO_LATE, FENCED)


class Aggregation(ABC, Generic[G]):
    """Base of aggregations. Methods that need the state of the rule get it as `state`."""

    acks_at_once: ClassVar[bool] = True
    """True if every push is acknowledged, and counted for its worker, when it arrives."""

    reduces: ClassVar[bool] = False
    """True if the server reduces tensors instead of holding weights."""

    report_size: ClassVar[int] = 0
    """Length of the report that the aggregation needs with each push."""

    def __init__(self, shard: ShardState, rule: Rule[G], make_apply: MakeApply) -> None:
        self.shard = shard
        self.rule = rule
        self.apply = make_apply(shard.weights)
        self.journal: Journal = no_journal

    @property
    def can_be_followed(self) -> bool:
        """True if the journal says all that a copy of the weights elsewhere needs."""
        return not self.reduces

    def unapplied(self, state: G) -> list[Effect]:
        """Return the effects that a copy of the weights lacks: acknowledged pushes that are not in them."""
        return []

    @abstractmethod
    def push(self, state: G, push: Push) -> list[PushAck]:
        """Handle a push; return the acks that can be sent now."""

    def after(self, state: G) -> list[Answer]:
        """Apply pushes that have become due; called after every message."""
        return []

    def weights_for(self, state: G, worker: int | None) -> Tensors:
        """Return the weights that a worker reads; None: those for an evaluation, with all pushes in them."""
        return self.shard.weights

    @property
    def pending(self) -> Mapping[int, int]:
        """The number of each worker's latest pushes that are not in the weights yet, if there are any."""
        return {}

    def join(self, worker: int, new: bool) -> None:
        """Add a worker; `new` if it has never joined before."""

    def leave(self, worker: int) -> None:
        """Remove a worker."""

    def expects(self, worker: int, number: int) -> bool:
        """Return whether a worker's tensor for a reduction is still needed."""
        return False

    def reduce(self, message: Reduce) -> None:
        """Add a worker's tensor to a reduction."""
        raise OffbeatError("this strategy's server holds weights and does not reduce tensors")

    def tick(self, state: G, at_s: float) -> None:
        """Advance the aggregation's clock to a message's timestamp."""

    def wake_at(self, state: G) -> float | None:
        """Return the time at which the aggregation needs a Tick; None if it needs none."""
        return None

    def restart(self, state: G) -> None:
        """Forget all pushes: the weights have been replaced."""
        self.clear_optimizer()

    # --- the optimizer's state, where the server has the optimizer

    def clear_optimizer(self) -> None:
        if isinstance(self.apply, ServerOptimizer):
            self.apply.clear_state()

    def save_optimizer(self, part: int) -> Tensors:
        assert isinstance(self.apply, ServerOptimizer)
        return self.apply.save_state(part)

    def copy_optimizer(self, part: int, into: Tensors) -> None:
        assert isinstance(self.apply, ServerOptimizer)
        self.apply.copy_state(part, into)

    def load_optimizer(self, part: int, tensors: Tensors) -> None:
        assert isinstance(self.apply, ServerOptimizer)
        self.apply.load_state(part, tensors)


MakeAggregation = Callable[[ShardState, Any, MakeApply], Aggregation[Any]]


def ack(push: Push, refused: str = "") -> PushAck:
    """Acknowledge a push, or refuse it for a reason."""
    if not refused:
        return _accepted(push.worker, push.clock)
    return PushAck(
        worker=push.worker, clock=push.clock, refused=f"its update of clock {push.clock} {refused}"
    )


@lru_cache(64)  # all shards of a virtual server say the same
def _accepted(worker: int, clock: int) -> PushAck:
    return PushAck(worker=worker, clock=clock)


def refusal_index(refused: str) -> int:
    """Return the index in REFUSALS of a reason for which a push was refused; 0 if it was accepted."""
    found = [index for index, words in enumerate(REFUSALS) if words and words in refused]
    return found[0] if found else len(REFUSALS) * bool(refused)


def _effect(kind: EffectKind, push: Push, weight: float = 0.0, factor: float = 1.0) -> Effect:
    return Effect(
        kind=kind,
        clocks={push.worker: push.clock},
        update=push.update,
        report=push.report,
        weight=weight,
        factor=factor,
    )


class Immediate(Aggregation[G]):
    """Aggregation that applies every push at once."""

    def push(self, state: G, push: Push) -> list[PushAck]:
        if not push.finite:
            return [ack(push, NOT_FINITE)]
        self.apply_push(state, push)
        if self.journal is not no_journal:
            self.journal(_effect(EffectKind.APPLY, push))
        return [ack(push)]

    def apply_push(self, state: G, push: Push) -> None:
        self.apply(self.shard.weights, push)


class Barrier(Aggregation[G]):
    """Aggregation that applies the mean of all members' pushes, once all have arrived, and acks them then.

    So no worker is ahead of another by more than its unacknowledged push. Workers must not change the tensors
    of such a push.
    """

    acks_at_once = False

    def __init__(self, shard: ShardState, rule: Rule[G], make_apply: MakeApply) -> None:
        super().__init__(shard, rule, make_apply)
        self._pushes: dict[int, Push] = {}
        self._mean: Tensors = []  # memory that is allocated once

    @property
    def pending(self) -> Mapping[int, int]:
        return dict.fromkeys(self._pushes, 1)

    def push(self, state: G, push: Push) -> list[PushAck]:
        self._pushes[push.worker] = push
        return []

    def after(self, state: G) -> list[Answer]:
        members = self.rule.members(state)
        if not self._pushes or len(self._pushes) < len(members) or not self._pushes.keys() >= set(members):
            return []
        # In the order of workers, not of arrival: the sum must not depend on which worker was faster.
        pushes = [self._pushes[worker] for worker in sorted(self._pushes)]
        self._pushes = {}
        clocks = {push.worker: push.clock for push in pushes}
        if finite := [push for push in pushes if push.finite]:
            mean = self._mean_of(finite)
            self.apply(self.shard.weights, mean)
            if self.journal is not no_journal:  # the next round's mean may lie in the same memory
                update = [part.clone() for part in mean.update]
                self.journal(Effect(kind=EffectKind.APPLY, clocks=clocks, update=update, report=mean.report))
        else:
            self.journal(Effect(kind=EffectKind.CLOCKS, clocks=clocks))
        for push in pushes:
            if push.worker in members:  # the worker has not left since
                self.rule.advance(state, push)
        return [ack(push, "" if push.finite else NOT_FINITE) for push in pushes]

    def restart(self, state: G) -> None:
        super().restart(state)
        self._pushes.clear()

    def _mean_of(self, pushes: list[Push]) -> Push:
        """Merge pushes into one, with their mean update and the largest of each number that they report."""
        fraction = 1 / len(pushes)
        if not self._mean:
            self._mean = [torch.empty_like(part) for part in pushes[0].update]
        torch._foreach_copy_(self._mean, pushes[0].update)
        torch._foreach_mul_(self._mean, fraction)
        for push in pushes[1:]:
            torch._foreach_add_(self._mean, push.update, alpha=fraction)
        report = zip(*(push.report for push in pushes), strict=True)
        return replace(pushes[0], update=self._mean, report=tuple(map(max, report)))


class WeightedRounds(Aggregation[G]):
    """Aggregation that gathers pushes into a weighted mean, and applies it when a round ends."""

    def __init__(self, shard: ShardState, rule: Rule[G], make_apply: MakeApply) -> None:
        super().__init__(shard, rule, make_apply)
        self._gathered = RunningMean()

    @abstractmethod
    def weight(self, state: G, push: Push) -> float:
        """Count a push in its round; return its weight in the mean, or 0 if it arrived too late."""

    @abstractmethod
    def due(self, state: G) -> float | None:
        """End the round if it is over, and return the factor to apply its mean with; else return None."""

    def factor(self, state: G) -> float:
        """Return the factor that the mean would be applied with if the round ended now."""
        return 1.0

    @property
    def pending(self) -> Mapping[int, int]:
        return self._gathered.workers

    def unapplied(self, state: G) -> list[Effect]:
        clocks = {worker: self.shard.applied[worker] for worker in self.pending}
        return self._gathered.effects(clocks, self.factor(state))

    def push(self, state: G, push: Push) -> list[PushAck]:
        weight = self.weight(state, push)
        if not push.finite:
            return [ack(push, NOT_FINITE)]
        if weight <= 0:
            return [ack(push, TOO_LATE)]
        self._gathered.add(push, weight)
        self.journal(_effect(EffectKind.GATHER, push, weight=weight, factor=self.factor(state)))
        return [ack(push)]

    def after(self, state: G) -> list[Answer]:
        if (factor := self.due(state)) is not None:
            self._gathered.add_to(self.shard.weights, factor)
            self.journal(Effect(kind=EffectKind.FOLD, factor=factor))
        return []

    def restart(self, state: G) -> None:
        super().restart(state)
        self._gathered.clear()


class RunningMean:
    """Weighted mean of updates that are not in the weights yet."""

    def __init__(self) -> None:
        self.workers: Counter[int] = Counter()  # how many updates of each worker are in the mean
        self._mean: Tensors = []  # memory that is allocated once
        self._weight = 0.0

    def add(self, push: Push, weight: float) -> None:
        self.workers[push.worker] += 1
        self._weight += weight
        if not self._mean:
            self._mean = [torch.empty_like(part) for part in push.update]
        if self._weight == weight:  # the first update
            torch._foreach_copy_(self._mean, push.update)
        else:
            torch._foreach_lerp_(self._mean, push.update, weight / self._weight)

    def add_to(self, weights: Tensors, factor: float) -> None:
        """Add the mean, times `factor`, to the weights, and start over."""
        if self.workers:
            torch._foreach_add_(weights, self._mean, alpha=factor)
        self.clear()

    def take(self) -> Tensors:
        """Return the mean, and start over; it lies in memory that the next one uses. Empty: there is none."""
        mean = self._mean if self.workers else []
        self.clear()
        return mean

    def effects(self, clocks: dict[int, int], factor: float) -> list[Effect]:
        """Return the mean as one effect, in memory of its own; none if nothing is in it."""
        if not self.workers:
            return []
        mean = [part.clone() for part in self._mean]
        kind = EffectKind.GATHER
        return [Effect(kind=kind, clocks=clocks, update=mean, weight=self._weight, factor=factor)]

    def clear(self) -> None:
        self.workers.clear()
        self._weight = 0.0


class ReduceOnly(Aggregation[G]):
    """Aggregation that has no weights, and reduces tensors for workers that hold the weights themselves."""

    reduces = True

    def __init__(self, shard: ShardState, rule: Rule[G], make_apply: MakeApply) -> None:
        super().__init__(shard, rule, make_apply)
        self._reductions = ServerReduce()

    def push(self, state: G, push: Push) -> list[PushAck]:
        return [ack(push, "is not expected: this server only reduces")]

    def join(self, worker: int, new: bool) -> None:
        self._reductions.join(worker, new)

    def leave(self, worker: int) -> None:
        self._reductions.leave(worker)

    def expects(self, worker: int, number: int) -> bool:
        return self._reductions.expects(worker, number)

    def reduce(self, message: Reduce) -> None:
        self._reductions.add(message)

    def after(self, state: G) -> list[Answer]:
        return list(self._reductions.replies())

    def restart(self, state: G) -> None:
        super().restart(state)
        self._reductions.restart()
