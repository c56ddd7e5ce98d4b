"""WorkerSession: one worker's connection to a shard, served by a thread of its own."""

from __future__ import annotations

import logging
import time
from typing import Any, Protocol

import torch

from offbeat.core.finite import is_finite
from offbeat.core.port import Op
from offbeat.errors import OffbeatError
from offbeat.server.aggregation import Aggregation, refusal_index
from offbeat.server.half import ServerHalf
from offbeat.server.messages import (
    Answer,
    ClientMessage,
    JoinAck,
    Pull,
    PullReply,
    Push,
    PushAck,
    Reduce,
    ReduceReply,
    Save,
    SaveReply,
    Tensors,
)
from offbeat.server.packets import allocate, decode, encode
from offbeat.worlds.processes.server.config import ShardConfig
from offbeat.worlds.processes.server.connection import Connection
from offbeat.worlds.processes.server.looks import Looks
from offbeat.worlds.processes.server.wire import (
    FIRST,
    NOW,
    REDUCTIONS,
    MessageType,
    ProtocolError,
    encode_header,
    read_header,
    reduce_capacity,
)

log = logging.getLogger("offbeat.server")


class Shard(Protocol):
    """The shard, as a session sees it."""

    looks: Looks

    def join(self, session: WorkerSession, clock: int | None, pushes: int, rejoins: bool) -> bool:
        """Add the session's worker, and answer it; return whether the shard has weights.

        `rejoins`: another shard has let the worker rejoin at a later clock.
        """
        ...

    def leave(self, session: WorkerSession, announced: bool) -> None:
        """Remove the session's worker, unless it has reconnected; `announced`: it sent LEAVE."""
        ...

    def request(self, session: WorkerSession, message: ClientMessage) -> int:
        """Handle a message, and wait for its answer; return the bytes sent to other hosts so far."""
        ...

    def load_weights(self, tensors: Tensors, part: int, initial: bool) -> None:
        """Replace the weights, or a part of the optimizer's state; `initial`: only if there are none."""
        ...


class HungUp(ConnectionAbortedError):
    """The worker has closed the connection while it waited for an answer."""


class WorkerSession:
    """One worker's session: receives its messages, hands them to the shard, and sends the answers."""

    def __init__(
        self,
        shard: Shard,
        config: ShardConfig,
        half: ServerHalf,
        aggregation: Aggregation[Any],
        worker: int,
        connection: Connection,
    ) -> None:
        self.worker = worker
        self.connection = connection
        self.heard_s = time.monotonic()  # when the worker last sent something
        self.waits = False  # whether the worker waits for an answer, so that its silence is no failure
        self.hung_up = False  # whether the worker has closed the connection while it waited
        self.pushed = False  # whether the worker has pushed on this connection
        self.fenced = False  # whether it rejoined after others had trained on without it
        self.goes_on, self.looked_s, self.asked_s, self.busy_s = False, 0.0, 0.0, 0.0  # see `Looks`
        self._shard = shard
        self._config = config
        self._half = half
        self._aggregation = aggregation
        self._report = torch.zeros(config.report_size + aggregation.report_size, dtype=torch.float64)
        # An update that arrives, or a copy of the weights that are sent, as they were when this worker was
        # admitted. Never both: the session serves one message at a time, and a push ends with its ack.
        self._tensors = config.buffers()
        self._push_packets = [allocate(codec, self._tensors) for codec in half.push_codecs]
        self._pull_packets = allocate(half.pull_codec, self._tensors) if half.pull_codec else None
        capacity = reduce_capacity(self._tensors) if aggregation.reduces else 0
        self._reduce_buffer = torch.zeros(capacity, dtype=torch.uint8)
        self._reduced = self._reduce_buffer  # the part of the buffer that the current reduction uses
        self._expected: type[Answer] = JoinAck
        self._answer: Answer | None = None
        self.remote_bytes = 0  # that the shard had sent to other hosts when it answered

    # --- called by the shard, which holds its lock

    def expect(self, message: ClientMessage) -> None:
        """Prepare for the answer to this message."""
        self._answer = None
        self.goes_on = isinstance(message, Pull | Reduce)
        self._expected = {Push: PushAck, Pull: PullReply, Reduce: ReduceReply, Save: SaveReply}[type(message)]

    @property
    def answered(self) -> bool:
        return self._answer is not None

    def answer(self, answer: Answer) -> int:
        """Store an answer and copy its tensors; return the bytes of tensors that will be sent."""
        if not isinstance(answer, self._expected):
            return 0  # the answer to a push of an earlier connection
        self._answer = answer
        match answer:
            case PullReply():
                torch._foreach_copy_(self._tensors, answer.weights)
                return sum(tensor.nbytes for tensor in self._outgoing(answer))
            case SaveReply():
                torch._foreach_copy_(self._tensors, answer.tensors)
                return sum(tensor.nbytes for tensor in self._tensors)
            case ReduceReply():
                self._reduced.copy_(answer.tensor)
                return self._reduced.nbytes
        return 0

    # --- the thread

    def serve(self, clock: int | None, pushes: int, rejoins: bool = False) -> None:
        """Serve the worker until it leaves or the connection ends."""
        announced = False
        has_weights = self._shard.join(self, clock, pushes, rejoins)
        try:
            self._acknowledge_join(has_weights)
            while not announced:
                announced = self._serve_one()
        except HungUp:
            announced = read_header(self.connection)[0] is MessageType.LEAVE  # or the end: then it raises
        finally:
            self._shard.leave(self, announced)

    def _acknowledge_join(self, has_weights: bool) -> None:
        ack = self._answer
        assert isinstance(ack, JoinAck)
        if ack.lost:
            megabytes = ack.lost * sum(part.nbytes for part in self._tensors) / 1e6
            text = "shard %d: %d updates of worker %d since the last snapshot are lost (%.1f MB)"
            log.warning(text, self._config.shard, ack.lost, self.worker, megabytes)
        self.connection.send(encode_header(MessageType.JOIN_ACK, ack.clock, ack.lost, int(has_weights)))

    def send_waiting(self, awaited: int, silent_s: float, joined: int) -> None:
        """Tell the waiting worker whom the shard waits for."""
        self.connection.send(encode_header(MessageType.WAITING, awaited, int(1000 * silent_s), joined))

    def send_looked(self, owed_s: float, busy_s: float) -> None:
        """Tell the worker what it owes for looks of others, before its answer."""
        self.connection.send(encode_header(MessageType.LOOKED, int(1e9 * owed_s), int(1e9 * busy_s)))

    def _serve_one(self) -> bool:
        """Serve one message; return whether it was LEAVE."""
        kind, first, second, third = read_header(self.connection)
        self.heard_s = time.monotonic()
        match kind:
            case MessageType.LOAD:
                self._handle_load(first, bool(second))
            case MessageType.PUSH:
                self._handle_push(first, second / 1e9, third)
            case MessageType.PULL:
                self._handle_pull(None if first == NOW else first)
            case MessageType.REDUCE:
                self._handle_reduce(first, second, *REDUCTIONS[third])
            case MessageType.SAVE:
                self._handle_save(first)
            case _ if kind in FIRST:
                raise ProtocolError(f"{kind.name} after JOIN")
        return kind is MessageType.LEAVE

    def _handle_load(self, part: int, initial: bool) -> None:
        self._check_part(part)
        if not self._receive_update():
            raise ProtocolError("weights that are not finite")
        self._shard.load_weights(self._tensors, part, initial)
        self.connection.send(encode_header(MessageType.PUSH_ACK))

    def _handle_push(self, clock: int, spent_s: float, codec: int) -> None:
        self.connection.receive(self._report)
        finite = self._receive_update(codec) and bool(self._report.isfinite().all())
        push = Push(
            worker=self.worker,
            clock=clock,
            update=self._tensors,
            report=tuple(self._report.tolist()),
            finite=finite,
            at_s=self._shard.looks.training_s(self.heard_s),
            spent_s=spent_s,
        )
        remote_bytes = self._shard.request(self, push)
        assert isinstance(self._answer, PushAck)
        refused = self._answer.refused
        if refused:  # the worker says so, once for all shards
            log.info("shard %d: refused worker %d: %s", self._config.shard, self.worker, refused)
        # Where pushes wait for each other, all earlier requests have been answered: the bytes are final.
        remote_bytes = 0 if self._aggregation.acks_at_once else remote_bytes
        reason = refusal_index(refused)
        self.connection.send(encode_header(MessageType.PUSH_ACK, clock, reason, remote_bytes))

    def _handle_pull(self, clock: int | None) -> None:
        remote_bytes = self._shard.request(self, Pull(worker=self.worker, clock=clock))
        reply = self._answer
        assert isinstance(reply, PullReply)
        outgoing = self._outgoing(reply)
        if outgoing is self._pull_packets and self._half.pull_codec is not None:
            encode(self._half.pull_codec, self._tensors, outgoing, reply.staleness, residual=False)
        numbers = reply.staleness, remote_bytes, reply.hint, reply.pushes
        header = encode_header(MessageType.PULL_REPLY, *numbers)
        self.connection.send(header, *outgoing)

    def _handle_save(self, part: int) -> None:
        self._check_part(part)
        remote_bytes = self._shard.request(self, Save(worker=self.worker, part=part))
        self.connection.send(encode_header(MessageType.PULL_REPLY, 0, remote_bytes), *self._tensors)

    def _handle_reduce(self, number: int, numel: int, dtype: torch.dtype, op: Op) -> None:
        nbytes = numel * dtype.itemsize
        if not self._aggregation.reduces or nbytes > self._reduce_buffer.nbytes:
            raise ProtocolError(f"{numel} elements to reduce, more than the shard accepts")
        self._reduced = self._reduce_buffer[:nbytes].view(dtype)
        for _ in self.connection.receive_pieces(self._reduced):
            self.heard_s = time.monotonic()
        message = Reduce(worker=self.worker, number=number, op=op, tensor=self._reduced)
        remote_bytes = self._shard.request(self, message)
        self.connection.send(encode_header(MessageType.REDUCE_REPLY, number, remote_bytes), self._reduced)

    def _receive_update(self, codec: int = 0) -> bool:
        """Receive an update; return whether it is finite, checked piece by piece while the next arrives."""
        if codec:
            return self._receive_packets(codec)
        finite = True
        for piece in self.connection.receive_pieces(*self._tensors):
            finite = finite and is_finite([piece])
            self.heard_s = time.monotonic()
        return finite

    def _receive_packets(self, codec: int) -> bool:
        if codec > len(self._push_packets):
            raise ProtocolError(f"a push with the unknown codec {codec}")
        packets = self._push_packets[codec - 1]
        self.connection.receive(*packets)
        try:
            decode(self._half.push_codecs[codec - 1], packets, self._tensors)
        except OffbeatError as malformed:
            raise ProtocolError(str(malformed)) from malformed
        return is_finite(self._tensors)

    def _outgoing(self, reply: PullReply) -> Tensors:
        """Return the tensors to send: the copied weights, or packets that are yet to be encoded from them."""
        return self._tensors if self._pull_packets is None or reply.for_evaluation else self._pull_packets

    def _check_part(self, part: int) -> None:
        if part > self._config.state_parts:
            raise ProtocolError(f"part {part} of an optimizer's state with {self._config.state_parts} parts")
