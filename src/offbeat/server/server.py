"""ParameterServer: one shard of the weights, as a state machine. Messages in, answers out.

The server has no socket, no clock and no thread: the virtual world and the shard's process drive the same
class. An answer names the worker that gets it; its tensors are not copies, so the driver must send or copy
them before it passes in the next message.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch

from offbeat.core.finite import is_finite
from offbeat.core.overrides import promises
from offbeat.server.aggregation import FENCED, Aggregation, ack
from offbeat.server.apply import MakeApply, make_apply
from offbeat.server.half import ServerHalf
from offbeat.server.journal import Effect, EffectKind
from offbeat.server.messages import (
    Answer,
    Join,
    JoinAck,
    Leave,
    Load,
    LoadAck,
    Message,
    Pull,
    PullReply,
    Push,
    PushAck,
    Reduce,
    Save,
    SaveReply,
    Tensors,
    Tick,
    changed,
)
from offbeat.server.rule import Rule
from offbeat.server.sharding import ShardState

ADD_UPDATES = make_apply(None)


class ParameterServer:
    """A strategy's server half, running on one shard."""

    def __init__(self, shard: ShardState, half: ServerHalf, make_apply: MakeApply = ADD_UPDATES) -> None:
        self.shard = shard
        self.rule = half.rule
        self.state: Any = half.rule.init()
        self.aggregation = half.aggregation(shard, half.rule, make_apply)
        self._applies_later = type(self.aggregation).after is not Aggregation.after
        self._has_clock = type(self.aggregation).tick is not Aggregation.tick
        self._hints = type(half.rule).hint is not Rule.hint
        self.refused: dict[int, int] = {}  # pushes, by worker
        self.pushes = sum(shard.applied.values())  # received, with those before a crash
        self._waiting: dict[int, Pull] = {}
        self._has_gate = promises(type(half.rule), "gate", "admits")
        self._gate: Hashable = None  # the rule's, when all who wait were looked at
        # A push counts in the clocks once its worker pulls, so that workers which are admitted together read
        # the very same weights: with a staleness of 0 that is BSP.
        self._uncounted: dict[int, Push] = {}
        # The clocks, after the first and up to the second, that a fenced worker has skipped.
        self._skipped: dict[int, tuple[int, int]] = {}
        for part, tensors in enumerate(shard.optimizer, start=1):
            self.aggregation.load_optimizer(part, tensors)
        shard.optimizer = []  # the optimizer has it now

    @property
    def weights(self) -> Tensors:
        """The weights for an evaluation, with all pushes in them."""
        return self.aggregation.weights_for(self.state, None)

    @property
    def applied_clocks(self) -> dict[int, int]:
        """The clock of each worker's latest push that is in the weights."""
        pending = self.aggregation.pending
        return {w: clock - pending.get(w, 0) for w, clock in self.shard.applied.items()}

    def handle(self, message: Message) -> list[Answer]:
        """Handle a message; return all answers that can be sent now, to any worker."""
        if isinstance(message, Push):  # first what comes most often
            if self._has_clock:
                self.aggregation.tick(self.state, message.at_s)
            answers: list[Answer] = self._handle_push(message)
        elif isinstance(message, Pull):
            if message.clock is not None and message.worker in self._uncounted:
                self.rule.advance(self.state, self._uncounted.pop(message.worker))
            self._waiting[message.worker] = message
            answers = []
        elif isinstance(message, Save):
            tensors = self.aggregation.save_optimizer(message.part)
            return [SaveReply(worker=message.worker, part=message.part, tensors=tensors)]
        elif isinstance(message, Load):
            self._load(message)
            return [LoadAck(worker=message.worker)]
        else:
            answers = self._handle_rare(message)
        if self._applies_later:
            answers += self.aggregation.after(self.state)
        for answer in answers:
            if isinstance(answer, PushAck) and answer.refused:
                if self.aggregation.acks_at_once:
                    self._record_clock(answer.worker)
                self.refused[answer.worker] = self.refused.get(answer.worker, 0) + 1
        return answers + self._admit(message) if self._waiting else answers

    def _handle_rare(self, message: Join | Leave | Tick | Reduce) -> list[Answer]:
        match message:
            case Reduce():
                self.aggregation.reduce(message)
            case Join():  # a worker that returns repeats its open requests
                self._forget(message.worker)
                self.aggregation.join(message.worker, message.clock is None)
                answer = self._join(message)
                self._record_clock(message.worker)
                return [answer]
            case Leave():
                self.aggregation.tick(self.state, message.at_s)
                self.rule.leave(self.state, message.worker)
                self.aggregation.leave(message.worker)
                self._forget(message.worker)
            case Tick():
                self.aggregation.tick(self.state, message.at_s)
        return []

    def restart(self, weights: Tensors) -> None:
        """Replace the weights, and restart all clocks, with the same workers."""
        torch._foreach_copy_(self.shard.weights, weights)
        members = self.rule.members(self.state)
        self.state, self._gate = self.rule.init(), None
        self.shard.applied.clear()
        self._uncounted.clear()
        self._skipped.clear()
        self.aggregation.restart(self.state)
        for worker in members:
            self._join(Join(worker=worker))

    def copy_into(self, copy: ShardState, state_parts: int) -> None:
        """Copy the state that outlives a crash; memory is allocated at the first call only."""
        weights = self.weights
        if not copy.weights:
            copy.weights = [torch.empty_like(weight) for weight in weights]
            copy.optimizer = [[torch.zeros_like(w) for w in weights] for _ in range(state_parts)]
        torch._foreach_copy_(copy.weights, weights)
        for part, into in enumerate(copy.optimizer, start=1):
            self.aggregation.copy_optimizer(part, into)
        copy.applied = self.applied_clocks

    def count_lost(self, worker: int, clock: int, pushes: int | None) -> int:
        """Return how many acknowledged pushes of a worker are not here; numbers as in `Join`."""
        first = 0 if pushes is None else max(0, clock - pushes)
        return max(0, clock - self.shard.applied.get(worker, first))

    def unapplied(self) -> list[Effect]:
        """Return the effects that `copy_into` leaves out: acknowledged pushes that are not in the weights."""
        return self.aggregation.unapplied(self.state)

    def _record_clock(self, worker: int) -> None:
        clocks = {worker: self.shard.applied[worker]}
        if self.aggregation.acks_at_once or worker not in self.aggregation.pending:
            self.aggregation.journal(Effect(kind=EffectKind.CLOCKS, clocks=clocks))

    def _load(self, message: Load) -> None:
        if message.part:
            self.aggregation.load_optimizer(message.part, message.tensors)
        else:
            self.restart(message.tensors)

    def _join(self, join: Join) -> JoinAck:
        applied = self.shard.applied
        if join.fenced and join.clock is not None:
            return self._join_fenced(join, join.clock)
        self._skipped.pop(join.worker, None)
        clock = self.rule.join(self.state, join.worker, join.clock)
        if join.clock is None:
            applied[join.worker] = clock
        lost = self.count_lost(join.worker, clock, join.pushes)
        # What is lost is lost for good: the next push is new.
        applied[join.worker] = max(clock, applied.get(join.worker, 0))
        return JoinAck(worker=join.worker, clock=clock, lost=lost)

    def _join_fenced(self, join: Join, clock: int) -> JoinAck:
        """Add a worker that others have trained on without: at the slowest clock, so that none waits for it.

        A push that it made before belongs to weights long replaced, and is refused.
        """
        applied = self.shard.applied
        self.rule.leave(self.state, join.worker)  # it may still be a member, and then the slowest
        slowest = self.rule.join(self.state, join.worker, None)
        if slowest <= clock:  # it is not behind
            self.rule.leave(self.state, join.worker)
            return self._join(replace(join, fenced=False))
        held = applied.get(join.worker, clock)
        self._skipped[join.worker] = (held, slowest)
        applied[join.worker] = max(held, slowest)
        return JoinAck(worker=join.worker, clock=slowest)

    def _forget(self, worker: int) -> None:
        self._waiting.pop(worker, None)
        self._uncounted.pop(worker, None)

    def _handle_push(self, push: Push) -> list[Answer]:
        at_once = self.aggregation.acks_at_once
        if push.clock <= self.shard.applied.get(push.worker, 0):  # sent again by a worker that missed the ack
            after, up_to = self._skipped.get(push.worker, (0, 0))
            if after < push.clock <= up_to:
                return [ack(push, FENCED)]
            if not at_once and push.worker in self.aggregation.pending:
                return []  # the worker gets its ack with the others
            self._uncounted[push.worker] = push
            return [ack(push)]
        self.shard.applied[push.worker] = push.clock
        self.pushes += 1
        if push.finite is None:
            push = changed(push, finite=is_finite(push.update))
        if at_once:  # accepted or refused, the worker has done its step: others must not wait for it
            self._uncounted[push.worker] = push
        return list(self.aggregation.push(self.state, push))

    def _admit(self, message: Message) -> list[Answer]:
        """Answer the pulls that the rule admits: of all who wait or, if nothing changed for them, the new."""
        if len(self._waiting) == 1 and isinstance(message, Pull) and self._admits(message):
            del self._waiting[message.worker]
            return [self._reply(message)]
        gate = self.rule.gate(self.state) if self._has_gate else None
        unchanged, self._gate = gate is not None and gate == self._gate, gate
        if unchanged:
            if not isinstance(message, Pull):
                return []
            pulls = [message]
        else:
            pulls = list(self._waiting.values())
        admitted = [pull for pull in pulls if self._admits(pull)]
        for pull in admitted:
            del self._waiting[pull.worker]
        return [self._reply(pull) for pull in admitted]

    def _admits(self, pull: Pull) -> bool:
        return pull.clock is None or self.rule.admits(self.state, pull.worker, pull.clock)

    def _reply(self, pull: Pull) -> PullReply:
        evaluation = pull.clock is None
        return PullReply(
            worker=pull.worker,
            staleness=self.rule.staleness_of(self.state, pull.worker, pull.clock),
            hint=self.rule.hint(self.state, pull.worker) if self._hints else 0,
            pushes=self.pushes,
            for_evaluation=evaluation,
            weights=self.aggregation.weights_for(self.state, None if evaluation else pull.worker),
        )
