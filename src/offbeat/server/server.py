"""ParameterServer: one shard of the weights, as a state machine. Messages in, answers out.

There is no socket, no clock and no thread in it: the virtual world and the real links drive the same class.
An answer says who is to get the weights as they are now; the one who drives sends them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import torch

from offbeat.core.finite import is_finite
from offbeat.server.apply import ApplyUpdate, add_update
from offbeat.server.messages import (
    Answer,
    Join,
    JoinAck,
    Leave,
    Message,
    Pull,
    PullReply,
    Push,
    PushAck,
    Reduce,
    Tensors,
    Tick,
)
from offbeat.server.optimizer_spec import ServerOptimizer
from offbeat.server.reduction import ServerReduce
from offbeat.server.rule import Rule

G = TypeVar("G")
NOT_FINITE = "is not finite"


@dataclass
class ShardState:
    """What outlives a server that crashes: its weights, and what is in them."""

    weights: Tensors
    applied: dict[int, int] = field(default_factory=dict)  # each worker's latest push, refused or not


class ParameterServer(Generic[G]):
    def __init__(self, memory: ShardState, rule: Rule[G], fold: ApplyUpdate = add_update) -> None:
        self.memory = memory
        self.rule = rule
        self.fold = fold
        self.state = rule.init()
        self.refused: dict[int, int] = {}  # by worker
        self._waiting: dict[int, Pull] = {}
        # A push counts in the clocks once its worker asks to go on, so that workers which are let on together
        # read the very same weights: with a staleness of 0 that is BSP.
        self._uncounted: dict[int, Push] = {}
        self._gathered = RunningMean()
        self._together = PushBarrier()
        self.sums = ServerReduce()

    @property
    def weights(self) -> Tensors:
        return self.memory.weights

    @property
    def held(self) -> dict[int, int]:
        """The latest push of each worker that is in the weights: what is only gathered is not yet."""
        waiting = self._gathered.of | self._together.of.keys()
        return {w: clock - (w in waiting) for w, clock in self.memory.applied.items()}

    def handle(self, message: Message) -> list[Answer]:
        """Take a message; all answers that can be given now, to whomever."""
        answers: list[Answer] = []
        if isinstance(message, Push | Leave | Tick):
            self.rule.tick(self.state, message.at_s)
        match message:
            case Push():
                answers += self._take(message)
            case Pull():
                if message.clock is not None and message.worker in self._uncounted:
                    self.rule.advance(self.state, self._uncounted.pop(message.worker))
                self._waiting[message.worker] = message
            case Reduce():
                self.sums.add(message)
            case Join():  # who comes back asks again for what it still wants
                self._forget(message.worker)
                self.sums.join(message.worker, message.clock is None)
                answers.append(self._welcome(message))
            case Leave():
                self.rule.leave(self.state, message.worker)
                self.sums.leave(message.worker)
                self._forget(message.worker)
        if (factor := self.rule.due(self.state)) is not None:
            self._gathered.fold_into(self.weights, factor)
        return [*answers, *self._step_together(), *self.sums.totals(), *self._admit()]

    def part(self, number: int) -> Tensors:
        """The weights, or what the optimizer keeps, for an answer."""
        return self.fold.kept(number) if number and isinstance(self.fold, ServerOptimizer) else self.weights

    def restart(self, weights: Tensors | None = None) -> None:
        """The weights were replaced, or are, by these: begin to count anew, with the same workers."""
        if weights is not None:
            torch._foreach_copy_(self.memory.weights, weights)
        members = self.rule.members(self.state)
        self.state = self.rule.init()
        self.memory.applied.clear()
        self._uncounted.clear()
        self._gathered.forget()
        self._together.of.clear()
        self.sums.restart()
        if isinstance(self.fold, ServerOptimizer):
            self.fold.forget()
        for worker in members:
            self._welcome(Join(worker=worker))

    def _welcome(self, join: Join) -> JoinAck:
        applied = self.memory.applied
        clock = self.rule.join(self.state, join.worker, join.clock)
        if join.clock is None:
            applied[join.worker] = clock
        first = 0 if join.pushes is None else max(0, clock - join.pushes)
        lost = max(0, clock - applied.setdefault(join.worker, first))
        if lost:  # gone for good: what comes next is new
            applied[join.worker] = clock
        return JoinAck(worker=join.worker, clock=clock, lost=lost)

    def _forget(self, worker: int) -> None:
        self._waiting.pop(worker, None)
        self._uncounted.pop(worker, None)

    def _take(self, push: Push) -> list[Answer]:
        if push.clock <= self.memory.applied.get(push.worker, 0):  # sent again by one who missed the receipt
            if push.worker in self._together.of:
                return []  # which it will get with the others
            self._uncounted[push.worker] = push
            return [PushAck(worker=push.worker, clock=push.clock)]
        self.memory.applied[push.worker] = push.clock
        if push.finite is None:
            push = replace(push, finite=is_finite(push.update))
        if self.rule.together:
            self._together.of[push.worker] = push
            return []
        # Refused or not, the worker has done its step: the others must not wait for it.
        self._uncounted[push.worker] = push
        weight = self.rule.weight(self.state, push)
        reason = ""
        if not push.finite:
            reason = NOT_FINITE
        elif weight is None:
            self._fold(push)
        elif weight > 0:
            self._gathered.add(push, weight)
        else:
            reason = "comes too late"
        return [self._receipt(push, reason)]

    def _receipt(self, push: Push, reason: str) -> PushAck:
        if reason:
            self.refused[push.worker] = self.refused.get(push.worker, 0) + 1
            reason = f"its update of clock {push.clock} {reason}"
        return PushAck(worker=push.worker, clock=push.clock, refused=reason)

    def _step_together(self) -> list[Answer]:
        """Where pushes wait for each other: fold them in once those of all who are here have come."""
        members = self.rule.members(self.state)
        if not self._together.of or not self._together.of.keys() >= set(members):
            return []
        pushes = self._together.take()
        if taken := [push for push in pushes if push.finite]:
            self._fold(self._together.mean(taken))
        for push in pushes:
            if push.worker in members:  # and has not gone since
                self.rule.advance(self.state, push)
        return [self._receipt(push, "" if push.finite else NOT_FINITE) for push in pushes]

    def _admit(self) -> list[Answer]:
        admitted = [
            pull
            for pull in self._waiting.values()
            if pull.clock is None or self.rule.admits(self.state, pull.worker, pull.clock)
        ]
        for pull in admitted:
            del self._waiting[pull.worker]
        return [self._reply(pull) for pull in admitted]

    def _reply(self, pull: Pull) -> PullReply:
        worker, rule, state = pull.worker, self.rule, self.state
        return PullReply(
            worker=worker,
            staleness=rule.staleness_of(state, worker, pull.clock),
            hint=rule.hint(state, worker),
            for_evaluation=pull.clock is None,
            weights=self._shown(pull),
        )

    def _fold(self, push: Push) -> None:
        self.fold(self.weights, push)

    def _shown(self, pull: Pull) -> Tensors:
        """The weights that a worker gets, or a part of what the optimizer keeps."""
        return self.part(pull.part)


class RunningMean:
    """The weighted mean of updates that are not in the weights yet."""

    def __init__(self) -> None:
        self.of: set[int] = set()  # the workers whose updates these are
        self._mean: Tensors = []  # memory that is taken once
        self._weight = 0.0

    def add(self, push: Push, weight: float) -> None:
        self.of.add(push.worker)
        self._weight += weight
        if not self._mean:
            self._mean = [torch.empty_like(part) for part in push.update]
        if self._weight == weight:  # the first
            torch._foreach_copy_(self._mean, push.update)
        else:
            torch._foreach_lerp_(self._mean, push.update, weight / self._weight)

    def fold_into(self, weights: Tensors, factor: float) -> None:
        if self.of:
            torch._foreach_add_(weights, self._mean, alpha=factor)
        self.forget()

    def forget(self) -> None:
        self.of.clear()
        self._weight = 0.0


class PushBarrier:
    """Pushes that wait for those of all others, as they are: who brought them leaves them alone meanwhile."""

    def __init__(self) -> None:
        self.of: dict[int, Push] = {}
        self._mean: Tensors = []  # memory that is taken once

    def take(self) -> list[Push]:
        """In the order of workers, not of their coming: so a sum does not depend on who was faster."""
        of, self.of = self.of, {}
        return [of[worker] for worker in sorted(of)]

    def mean(self, pushes: list[Push]) -> Push:
        """One push for all of them. Of each figure, the largest."""
        share = 1 / len(pushes)
        if not self._mean:
            self._mean = [torch.empty_like(part) for part in pushes[0].update]
        torch._foreach_copy_(self._mean, pushes[0].update)
        torch._foreach_mul_(self._mean, share)
        for push in pushes[1:]:
            torch._foreach_add_(self._mean, push.update, alpha=share)
        report = zip(*(push.report for push in pushes), strict=True)
        return replace(pushes[0], update=self._mean, report=tuple(map(max, report)))


def split_shards(flats: Tensors, shards: int) -> list[Tensors]:
    """The part of every flat tensor that each shard owns: equal slices, in order."""
    return [
        [flat[low:high] for flat, (low, high) in zip(flats, shard_bounds(flats, k, shards), strict=True)]
        for k in range(shards)
    ]


def shard_bounds(flats: Tensors, shard: int, shards: int) -> list[tuple[int, int]]:
    """From where to where in each flat tensor a shard's part goes."""
    return [(f.numel() * shard // shards, f.numel() * (shard + 1) // shards) for f in flats]
