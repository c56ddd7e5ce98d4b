"""TcpTransport: carries a worker's messages to all shards over TCP, and counts their bytes and seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from offbeat.core.ledger import Ledger
from offbeat.core.pending import Arrived, Pending
from offbeat.errors import OffbeatError, RankLost
from offbeat.server.aggregation import REFUSALS
from offbeat.server.client import Operation, ServerClient
from offbeat.server.half import ServerHalf
from offbeat.server.messages import (
    Answer,
    ClientMessage,
    Load,
    LoadAck,
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
from offbeat.server.sharding import split_shards
from offbeat.worlds.processes.emulation import Shaper
from offbeat.worlds.processes.server.channel import ClientIdentity, Request, ShardChannel
from offbeat.worlds.processes.server.looks import Debt
from offbeat.worlds.processes.server.pending_request import PendingRequest
from offbeat.worlds.processes.server.staging import Staging
from offbeat.worlds.processes.server.standby import Standby
from offbeat.worlds.processes.server.supervisor import Supervisor
from offbeat.worlds.processes.server.turns import Turns
from offbeat.worlds.processes.server.wire import (
    HEADER,
    NOW,
    REDUCTIONS,
    MessageType,
    encode_header,
    reduce_capacity,
)

T = TypeVar("T")
log = logging.getLogger("offbeat")
refusals = logging.getLogger("offbeat.refused")


class TcpTransport:
    """Channels to all shards, as the client of one worker uses them."""

    def __init__(
        self,
        identity: ClientIdentity,
        shards: list[str],  # the shards' names in messages
        weights: Tensors,
        ledger: Ledger,
        shaper: Shaper | None = None,
        supervisor: Supervisor | None = None,
        local_shards: range | None = None,
        standby: Standby | None = None,
        pieces: int = 1,  # shards of each host, which are neighbours
    ) -> None:
        turns = [Turns() if pieces > 1 else None for _ in range(len(shards) // pieces)]  # by host
        self.channels = [
            ShardChannel(identity, shard, name, turns[shard // pieces]) for shard, name in enumerate(shards)
        ]
        self.joined_clock = max(channel.clock for channel in self.channels)
        self.ledger = ledger
        self.shaper = shaper
        self.timeout_s = identity.timeout_s
        self.worker = identity.worker
        self._supervisor = supervisor  # of the shards that this rank started, if any
        self._standby = standby  # for the supervisor of the shards on this host, if that is another rank's
        self._local_shards = local_shards  # the shards on this host; None: the server has machines of its own
        self._capacity = min(map(reduce_capacity, split_shards(weights, len(shards))))
        self._staging = [Staging() for _ in shards]
        self._told: set[str] = set()  # reasons for refused updates
        self.debt = Debt(len(shards))

    @property
    def shards(self) -> int:
        return len(self.channels)

    @property
    def has_weights(self) -> bool:
        """True if all shards have weights."""
        return all(channel.has_weights for channel in self.channels)

    @property
    def server_pid(self) -> int | None:
        """The id of the process, with shards of this host, that this rank started."""
        return self._supervisor.pid if self._supervisor else None

    def request(
        self,
        operation: Operation,
        messages: Sequence[ClientMessage],
        finish: Callable[[list[Any]], T],
    ) -> Pending[T]:
        requests, copy_backs = [], []
        sent = received = on_host = 0
        for shard, message in enumerate(messages):
            request, copy_back = self._encode(shard, message)
            requests.append(self.channels[shard].start(request))
            copy_backs.append(copy_back)
            outgoing, incoming = (
                sum(t.nbytes for t in ts) for ts in (_outgoing(message), _incoming(message))
            )
            if self._is_on_this_host(shard):  # whose sending no other worker counts
                on_host += outgoing + incoming
            else:
                sent += outgoing
                received += incoming
        self.ledger.sent(on_host, left_host=0)

        def receive() -> T:
            for copy_back in copy_backs:
                copy_back()
            answers = [
                self._decode(channel, message, request.header)
                for channel, message, request in zip(self.channels, messages, requests, strict=True)
            ]
            if self._local_shards is None:
                self.ledger.server_sent(received)
            self._charge_local_shards(
                [_remote_bytes(message, r.header) for message, r in zip(messages, requests, strict=True)]
            )
            reasons = {answer.refused for answer in answers if isinstance(answer, PushAck)} - {""}
            if reasons:
                self._tell_refusal(operation.number, min(reasons))
            return finish(answers)

        pairs = list(zip(self.channels, requests, strict=True))
        return PendingRequest(
            self, operation, pairs, receive, sent=sent, nbytes=sent + received, on_host=on_host
        )

    def _tell_refusal(self, number: str, reason: str) -> None:
        """Tell the first refusal for each reason; the ledger counts all."""
        if reason not in self._told:
            self._told.add(reason)
            text = "the server did not use update %s of this worker: it %s; metrics.refused counts all"
            refusals.warning(text, number, reason)

    def read(self, into: list[Tensors]) -> Pending[None]:
        """Read at once, not in order with the requests in progress: these may wait for other workers."""
        deadline = time.monotonic() + self.timeout_s
        for channel, part in zip(self.channels, into, strict=True):
            received = [torch.empty_like(tensor, device="cpu") for tensor in part]
            if lost := channel.read(received, deadline):
                raise lost
            _copy_back(received, part)
        return Arrived(None)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Hold all other workers still, while this one looks at the weights and its time does not count."""
        began_s = time.monotonic()
        with ExitStack() as looks:
            for channel in self.channels:
                looks.enter_context(closing(channel.look(began_s, began_s + self.timeout_s)))
            yield

    def rejoin_if_fenced(self, deadline: float) -> RankLost | None:
        """If a shard has let this worker rejoin as a newcomer, do the same at all others."""
        fenced = [channel for channel in self.channels if channel.fenced]
        if not fenced:
            return None
        log.warning(
            "this worker was silent for longer than the server waits: it continues with fresh weights, and "
            "its last update is dropped. If its steps take that long, raise timeout_s"
        )
        lost = None
        for channel in self.channels:
            if channel not in fenced:
                lost = lost or channel.rejoin(deadline)
            channel.fenced = False
        self.joined_clock = max(channel.clock for channel in self.channels)
        return lost

    def restart(self) -> None:
        """Count clocks from 0 again: the server's weights have been replaced."""
        self.joined_clock = 0
        for channel in self.channels:
            channel.clock, channel.pushes, channel.has_weights = 0, 0, True

    def confirm(self) -> None:
        """Warn if a shard no longer holds what it has acknowledged: it may have died since."""
        deadline = time.monotonic() + self.timeout_s
        for channel in self.channels:
            if unknown := channel.confirm(deadline):
                log.warning("it is not known whether this worker's updates are still there: %s", unknown)

    def leave(self) -> None:
        """Send LEAVE to all shards. The server ends when no worker is left."""
        if self._standby is not None:
            self._standby.end()  # the end of the shard is no crash any more
        for channel in self.channels:
            channel.leave()

    def close(self, patience_s: float) -> None:
        """Leave, and wait until the shard that this rank started has ended."""
        self.leave()
        for each in (self._supervisor, self._standby):
            if each is not None:
                each.stop(patience_s)

    def _encode(self, shard: int, message: ClientMessage) -> tuple[Request, Callable[[], None]]:
        """Return a message as a request, and a function that copies the answer to its tensors."""
        staging = self._staging[shard]
        outgoing = _outgoing(message)
        payload, ready = staging.send(outgoing, own_copy=isinstance(message, Reduce))
        if isinstance(message, Reduce):  # the result comes back into the same memory
            answer_buffers, copy_back = payload, lambda: _copy_back(payload, outgoing)
        else:
            answer_buffers, copy_back = staging.receive(_incoming(message))
        header: Tensor
        match message:
            case Push():
                header = encode_header(
                    MessageType.PUSH, message.clock, int(1e9 * message.spent_s), message.codec
                )
                payload = [torch.tensor(message.report, dtype=torch.float64), *payload]
            case Pull():
                header = encode_header(MessageType.PULL, NOW if message.clock is None else message.clock)
            case Reduce():
                if payload[0].nbytes > self._capacity:
                    raise OffbeatError(
                        f"a tensor of {payload[0].nbytes} bytes is too large for a shard to reduce"
                    )
                reduction = REDUCTIONS.index((message.tensor.dtype, message.op))
                header = encode_header(MessageType.REDUCE, message.number, message.tensor.numel(), reduction)
            case Save():
                header = encode_header(MessageType.SAVE, message.part)
            case Load():
                header = encode_header(MessageType.LOAD, message.part, int(message.initial))
        answer = [torch.zeros(HEADER, dtype=torch.int64), *answer_buffers]
        return Request([header, *payload], answer, ready), copy_back

    def _decode(self, channel: ShardChannel, message: ClientMessage, header: list[int]) -> Answer:
        _, first, second, third, fourth = header
        match message:
            case Push():
                channel.clock = max(channel.clock, first)
                channel.pushes += 1
                reason = [*REFUSALS, "was refused"][min(second, len(REFUSALS))]
                return PushAck(worker=self.worker, clock=first, refused=reason)
            case Pull():
                return PullReply(worker=self.worker, staleness=first, hint=third, pushes=fourth)
            case Reduce():
                return ReduceReply(worker=self.worker, number=first, tensor=message.tensor)
            case Save():
                return SaveReply(worker=self.worker, part=message.part)
            case Load():
                return LoadAck(worker=self.worker)

    def _is_on_this_host(self, shard: int) -> bool:
        """Return whether a shard is on this host. Under an emulated network each rank stands for a host."""
        if self._local_shards is not None or self.shaper is not None:
            return shard in (self._local_shards or ())
        return self.channels[shard].is_on_host

    def _charge_local_shards(self, remote_bytes: list[int]) -> None:
        """Count what this host's shards have sent to others, in the ledger of the host's first worker."""
        if self._local_shards is not None and self._supervisor is not None:
            sent = sum(remote_bytes[shard] for shard in self._local_shards)
            if sent:  # else unknown
                self.ledger.update_shard_sent(sent)


class ProcessServerClient(ServerClient):
    """The client of a real worker, which can also leave the server and restart from new weights."""

    def __init__(
        self, transport: TcpTransport, half: ServerHalf, *, world: int, weights: Tensors, state_parts: int
    ) -> None:
        self.transport = transport
        super().__init__(
            transport,
            half,
            transport.ledger,
            worker=transport.worker,
            world=world,
            weights=weights,
            state_parts=state_parts,
        )

    def restart(self) -> None:
        """Count clocks from 0 again: `load` has replaced the server's weights."""
        self.transport.restart()
        self.rejoin()
        self._reductions = 0

    def looking(self) -> AbstractContextManager[None]:
        """Hold all other workers still, while this one looks at the weights and its time does not count.

        Each of them stands still for as long as this one looks, from its next pull on, and its clock as well.
        """
        return self.transport.looking()

    def confirm(self) -> None:
        """Warn if a shard no longer holds this worker's updates."""
        self.transport.confirm()

    def leave(self) -> None:
        """Send LEAVE to all shards."""
        self.transport.leave()

    def close(self, patience_s: float) -> None:
        """Leave, and wait until the shard that this rank started has ended."""
        self.transport.close(patience_s)


def _outgoing(message: ClientMessage) -> Tensors:
    """Return the tensors that travel to the shard."""
    match message:
        case Push():
            return message.update
        case Reduce():
            return [message.tensor]
        case Load():
            return message.tensors
        case _:
            return []


def _incoming(message: ClientMessage) -> Tensors:
    """Return the worker's memory for tensors that travel back."""
    match message:
        case Pull() | Save():
            return message.into
        case Reduce():
            return [message.tensor]
        case _:
            return []


def _copy_back(received: Tensors, into: Tensors) -> None:
    for source, target in zip(received, into, strict=True):
        if source is not target:
            target.copy_(source)


def _remote_bytes(message: ClientMessage, header: list[int]) -> int:
    """Return the bytes that the shard has sent to other hosts so far, from its answer's header."""
    return header[3] if isinstance(message, Push) else header[2]
