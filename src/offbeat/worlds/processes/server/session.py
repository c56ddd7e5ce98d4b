"""Door: one worker's link to a shard, as the thread sees it that serves it: it hears, asks, and answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from offbeat.core.finite import is_finite
from offbeat.core.port import Op
from offbeat.errors import OffbeatError
from offbeat.server.messages import (
    Answer,
    JoinAck,
    Message,
    Pull,
    PullReply,
    Push,
    PushAck,
    Reduce,
    ReduceReply,
    Tensors,
)
from offbeat.server.packets import allocate, decode, encode
from offbeat.worlds.processes.server.wire import (
    NOW,
    WAYS_TO_SUM,
    Connection,
    MessageType,
    ProtocolError,
    encode_header,
    read_header,
    reduce_capacity,
)

if TYPE_CHECKING:
    from offbeat.worlds.processes.server.shard import ShardServer

log = logging.getLogger("offbeat.server")


class WorkerSession:
    """One worker's link, as its thread sees it."""

    def __init__(self, shard: ShardServer, worker: int, link: Connection) -> None:
        self.shard = shard
        self.worker = worker
        self.link = link
        self.report = shard.post.report(shard.server.rule.report)
        self.update = shard.post.buffers()
        self.copy = shard.post.buffers()  # of the weights, as they were when this worker was let on
        self.packets = [allocate(codec, self.update) for codec in shard.strategy.forms]
        answered_in = shard.strategy.answered_in
        self.coded = allocate(answered_in, self.copy) if answered_in else None
        sums = shard.server.rule.sums
        self.term = torch.zeros(reduce_capacity(self.update) if sums else 0, dtype=torch.uint8)
        self.part = self.term
        self.total: ReduceReply | None = None
        self.welcome: JoinAck | None = None
        self.receipt: PushAck | None = None
        self.reply: PullReply | None = None
        self.heard_s = time.monotonic()
        self.pushed = False
        self.waits = False  # to be answered: it has nothing to say

    def answer(self, answer: Answer) -> None:
        """The state machine has an answer for this worker. The lock is held."""
        match answer:
            case JoinAck():
                self.welcome = answer
            case PushAck():
                self.receipt = answer
            case PullReply():
                torch._foreach_copy_(self.copy, answer.weights)
                self.reply = answer
                self._count(sum(part.nbytes for part in self._outgoing(answer)))
            case ReduceReply():
                self.part.copy_(answer.tensor)
                self.total = answer
                self._count(self.part.nbytes)

    def _count(self, nbytes: int) -> None:
        if self.worker not in self.shard.post.neighbours:
            self.shard.sent_away += nbytes

    def _outgoing(self, reply: PullReply) -> Tensors:
        """What travels of the weights that were copied; it may still have to be packed."""
        return self.copy if self.coded is None or reply.for_evaluation else self.coded

    def serve(self, clock: int | None, pushes: int) -> None:
        said_goodbye = False
        self.shard.enter(self, clock, pushes)
        try:
            self._greet()
            while not said_goodbye:
                said_goodbye = self._one()
        finally:
            self.shard.exit(self, said_goodbye)

    def _greet(self) -> None:
        assert self.welcome is not None
        clock, lost = self.welcome.clock, self.welcome.lost
        if lost:
            nbytes = lost * sum(part.nbytes for part in self.update)
            said = "shard %d: %d updates of worker %d since the last snapshot are lost (%.1f MB)"
            log.warning(said, self.shard.post.shard, lost, self.worker, nbytes / 1e6)
        self.link.send(encode_header(MessageType.WELCOME, clock, lost, int(self.shard.filled)))

    def _one(self) -> bool:
        """Serve one message; whether it was the last."""
        kind, first, second, third = read_header(self.link)
        self.heard_s = time.monotonic()
        match kind:
            case MessageType.OPEN:
                self._check_part(first)
                if not self._receive():
                    raise ProtocolError("weights that are not finite")
                self.shard.fill(self.update, first)
                self.link.send(encode_header(MessageType.RECEIPT))
            case MessageType.PUSH:
                self._take(first, second / 1e9, third)
            case MessageType.PULL:
                self._check_part(second)
                self._let_on(None if first == NOW else first, second)
            case MessageType.TERM:
                self._sum(first, second, *WAYS_TO_SUM[third])
            case MessageType.JOIN:
                raise ProtocolError("JOIN twice")
        return kind is MessageType.LEAVE

    def _receive(self, form: int = 0) -> bool:
        """Take in an update; whether it is finite, looked at piece by piece while the next one comes."""
        if form:
            return self._receive_packets(form)
        finite = True
        for piece in self.link.coming(*self.update):
            finite = finite and is_finite([piece])
            self.heard_s = time.monotonic()
        return finite

    def _receive_packets(self, form: int) -> bool:
        if form > len(self.packets):
            raise ProtocolError(f"a push in form {form}")
        self.link.receive(*self.packets[form - 1])
        try:
            decode(self.shard.strategy.forms[form - 1], self.packets[form - 1], self.update)
        except OffbeatError as nonsense:
            raise ProtocolError(str(nonsense)) from nonsense
        return is_finite(self.update)

    def _take(self, clock: int, spent_s: float, form: int) -> None:
        self.link.receive(self.report)
        finite = self._receive(form) and bool(self.report.isfinite().all())
        with self.shard.changed:
            self._await_opening()
            # A newcomer's first clock is the highest that any shard gave it; from then on none is left out.
            if self.pushed and clock > self.shard.server.memory.applied[self.worker] + 1:
                raise ProtocolError(f"push {clock} before those that go before it")
            self.pushed, self.receipt = True, None
            push = Push(
                worker=self.worker,
                clock=clock,
                update=self.update,
                report=tuple(self.report.tolist()),
                finite=finite,
                at_s=self.heard_s,
                spent_s=spent_s,
            )
            self._ask(push, lambda: self.receipt is not None)
            assert self.receipt is not None
            refused = self.receipt.refused
            # Where pushes wait for each other, whatever was asked for before has been answered.
            sent_away = self.shard.sent_away if self.shard.server.rule.together else 0
        if refused:
            log.warning("shard %d: refused worker %d: %s", self.shard.post.shard, self.worker, refused)
        self.link.send(encode_header(MessageType.RECEIPT, clock, int(bool(refused)), sent_away))

    def _sum(self, number: int, numel: int, dtype: torch.dtype, op: Op) -> None:
        nbytes = numel * dtype.itemsize
        if not self.shard.server.rule.sums or nbytes > self.term.nbytes:
            raise ProtocolError(f"{numel} elements, for which there is no room")
        self.part = self.term[:nbytes].view(dtype)
        for _ in self.link.coming(self.part):
            self.heard_s = time.monotonic()
        with self.shard.changed:
            self._await_opening()
            if not self.shard.server.sums.expects(self.worker, number):
                raise ProtocolError(f"a term of sum {number}, in which it has no part any more")
            self.total = None
            term = Reduce(worker=self.worker, number=number, op=op, tensor=self.part)
            self._ask(term, lambda: self.total is not None)
            sent_away = self.shard.sent_away
        self.link.send(encode_header(MessageType.TOTAL, number, sent_away), self.part)

    def _check_part(self, part: int) -> None:
        if part > self.shard.parts:
            raise ProtocolError(f"part {part} of what has {self.shard.parts}")

    def _let_on(self, clock: int | None, part: int) -> None:
        shard = self.shard
        with shard.changed:
            self._await_opening()
            self.reply = None
            self._ask(Pull(worker=self.worker, clock=clock, part=part), lambda: self.reply is not None)
            assert self.reply is not None
            reply, sent_away = self.reply, shard.sent_away
        outgoing = self._outgoing(reply)
        if outgoing is self.coded and (codec := shard.strategy.answered_in):
            encode(codec, self.copy, outgoing, reply.staleness, remainder=False)
        self.link.send(encode_header(MessageType.WEIGHTS, reply.staleness, sent_away, reply.hint), *outgoing)

    def _ask(self, message: Message, answered: Callable[[], bool]) -> None:
        """Hand a message to the state machine, and wait until it is answered. The lock is held."""
        self.shard.tell(message)
        if not answered():
            self.waits = True
            self.shard.await_answer(self, answered)
            self._check_open()
            self.waits = False
        self.heard_s = time.monotonic()  # it is its turn from now on

    def _await_opening(self) -> None:
        """Until all have come. The lock is held."""
        shard = self.shard
        if not shard.changed.wait_for(lambda: shard.opened, shard.post.timeout_s):
            came, expected = len(shard.known), shard.post.workers
            log.warning("shard %d: only %d of %d workers have come", shard.post.shard, came, expected)
            raise ConnectionAbortedError("not all workers have come")
        self._check_open()

    @property
    def open(self) -> bool:
        return self.shard.doors.get(self.worker) is self

    def _check_open(self) -> None:
        if not self.open:
            raise ConnectionAbortedError("forgotten: it was silent for too long, or came in by another door")
