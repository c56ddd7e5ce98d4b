"""Parameter server in virtual time: shards that messages reach through the simulated network.

A shard runs beside each of the first workers, through whose NIC its traffic passes; if the cluster describes
servers, it runs on a machine of its own. The shards are the same state machines as the real ones, and workers
use the same client.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from offbeat.core.finite import is_finite
from offbeat.core.ledger import Ledger
from offbeat.core.pending import Arrived, Pending
from offbeat.errors import OffbeatError
from offbeat.server.apply import make_apply
from offbeat.server.client import Operation
from offbeat.server.half import ServerHalf
from offbeat.server.messages import (
    Answer,
    ClientMessage,
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
    ReduceReply,
    Save,
    SaveReply,
    Tensors,
    Tick,
)
from offbeat.server.optimizer_spec import OptimizerSpec
from offbeat.server.packets import allocate, decode, encode
from offbeat.server.server import ParameterServer
from offbeat.server.sharding import ShardState, shard_bounds, split_shards
from offbeat.worlds.virtual.cluster import Cluster
from offbeat.worlds.virtual.request import VirtualRequest
from offbeat.worlds.virtual.scheduler import Event, Scheduler

T = TypeVar("T")
MOST_SHARDS = 16
REQUEST_BYTES = 64  # of a request for weights


class VirtualServer:
    """All shards of a parameter server, and the messages in transit to and from them."""

    def __init__(
        self, scheduler: Scheduler, cluster: Cluster, half: ServerHalf, ledgers: list[Ledger]
    ) -> None:
        self.scheduler = scheduler
        self.ledgers = ledgers
        self.shards: list[ParameterServer] = []
        self._half = half
        network = scheduler.network
        dedicated = [network.server(k) for k in range(network.servers)] if cluster.server else []
        self._nodes = dedicated or list(range(min(cluster.size, MOST_SHARDS)))
        # Messages of one worker to one shard arrive in order: here they wait for earlier ones.
        self._queues: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self._joined_clocks: dict[int, int] = {}  # at which each worker joined
        self._clocks: dict[int, int] = {}  # of each worker's latest push
        self._awaited: dict[Hashable, _Awaited] = {}  # by shard and message
        self._wake_times: dict[int, float | None] = {}  # of the next Tick of each shard

    @property
    def size(self) -> int:
        """Number of shards."""
        return len(self._nodes)

    def joined_clock(self, worker: int) -> int:
        return self._joined_clocks[worker]

    def open(self, weights: Tensors, optimizer: OptimizerSpec | None) -> None:
        """Set the initial weights, and the optimizer if the server owns it, and let all workers join."""
        sizes = [weight.numel() for weight in weights]
        for shard, slices in enumerate(split_shards(weights, self.size)):
            state = ShardState([part.clone() for part in slices])
            spec = optimizer and optimizer.for_shard(shard_bounds(sizes, shard, self.size))
            self.shards.append(ParameterServer(state, self._half, make_apply(spec)))
        for worker in range(len(self.ledgers)):
            self._broadcast(Join(worker=worker))

    def leave(self, worker: int) -> None:
        self._broadcast(Leave(worker=worker, at_s=self.scheduler.now))

    def join(self, worker: int) -> None:
        """Let a worker that left join as a new one, at the slowest worker's clock."""
        self._joined_clocks.pop(worker, None)
        self._clocks.pop(worker, None)
        self._broadcast(Join(worker=worker))

    def read(self, into: list[Tensors]) -> None:
        """Copy each shard's weights as they are now; this takes no time."""
        for part, shard in zip(into, self.shards, strict=True):
            torch._foreach_copy_(part, shard.weights)

    def request(
        self,
        rank: int,
        operation: Operation,
        messages: Sequence[ClientMessage],
        finish: Callable[[list[Any]], T],
    ) -> Event[T]:
        """Send one message of a worker to each shard; `finish` makes the result from all answers."""
        first, ledger = messages[0], self.ledgers[rank]
        if isinstance(first, Push):
            self._clocks[rank] = first.clock
        nbytes = sum(_tensor_bytes(message) for message in messages)
        pending: VirtualRequest[T] = VirtualRequest(self.scheduler, ledger, operation, nbytes, _reason(first))
        free = ledger.is_paused and not isinstance(first, Push | Reduce)  # evaluations take no time
        answers: dict[int, Answer] = {}
        finite = _surely_finite(messages)

        def answered(shard: int, answer: Answer) -> None:
            answers[shard] = answer
            if len(answers) == len(messages):
                pending.complete(finish([answers[k] for k in range(len(messages))]))

        for shard, message in enumerate(messages):
            if self._nodes[shard] == rank:
                ledger.sent(_tensor_bytes(message), left_host=0)  # both ways
            self._awaited[shard, _key(message)] = _Awaited(message, partial(answered, shard), free, pending)
            arrive = partial(self._arrive, shard, self._decoded(shard, message), finite)
            self._enqueue(pending, shard, _nbytes(message), arrive, free)
        return pending

    def _decoded(self, shard: int, message: ClientMessage) -> ClientMessage:
        """Return a message with its update decoded; at once, because the packets are reused."""
        if not isinstance(message, Push) or not message.codec:
            return message
        update = [torch.zeros_like(weight) for weight in self.shards[shard].shard.weights]
        decode(self._half.push_codecs[message.codec - 1], message.update, update)
        return replace(message, update=update, codec=0)

    def _arrive(self, shard: int, message: ClientMessage, finite: bool | None) -> None:
        self._awaited[shard, _key(message)].request.arrive()
        if isinstance(message, Push):
            message = replace(message, at_s=self.scheduler.now, finite=finite)
        if isinstance(message, Reduce) and not self.shards[shard].aggregation.expects(
            message.worker, message.number
        ):
            raise OffbeatError(f"worker {message.worker} came back, but the server has no weights to give it")
        self._handle(shard, message)

    def _broadcast(self, message: Join | Leave) -> None:
        for shard in range(len(self.shards)):
            self._handle(shard, message)

    def _handle(self, shard: int, message: Message) -> None:
        server = self.shards[shard]
        for answer in server.handle(message):
            if isinstance(answer, JoinAck):
                if answer.worker not in self._clocks:  # shards may differ in their slowest worker
                    self._joined_clocks[answer.worker] = max(
                        self._joined_clocks.get(answer.worker, 0), answer.clock
                    )
            else:
                self._answer(shard, answer)
        wake_at = server.aggregation.wake_at(server.state)
        if wake_at is not None and wake_at != self._wake_times.get(shard):
            tick = partial(self._handle, shard, Tick(at_s=wake_at))
            self.scheduler.at(max(wake_at, self.scheduler.now), tick)
        self._wake_times[shard] = wake_at

    def _answer(self, shard: int, answer: PushAck | PullReply | ReduceReply | SaveReply | LoadAck) -> None:
        """Send an answer to its worker; of a receipt, which is short, only the latency counts."""
        awaited = self._awaited.pop((shard, _key(answer)))
        awaited.request.answer()
        if isinstance(answer, PushAck | LoadAck):
            self._send(self._nodes[shard], answer.worker, 0, partial(awaited.answered, answer), awaited.free)
            return
        copies, into = self._copied(answer), _incoming(awaited.message)

        def arrive() -> None:
            torch._foreach_copy_(into, copies)
            awaited.answered(answer)

        nbytes = sum(tensor.nbytes for tensor in copies)
        self._send(self._nodes[shard], answer.worker, nbytes, arrive, awaited.free)

    def _copied(self, answer: PullReply | ReduceReply | SaveReply) -> Tensors:
        """Copy an answer's tensors, which the next message may change; encode weights for training."""
        if isinstance(answer, ReduceReply):
            return [answer.tensor.clone()]
        if isinstance(answer, SaveReply):
            return answer.tensors
        codec = self._half.pull_codec
        if codec is None or answer.for_evaluation:
            return [weight.clone() for weight in answer.weights]
        packets = allocate(codec, answer.weights)
        encode(codec, answer.weights, packets, answer.staleness, residual=False)
        return packets

    def _enqueue(
        self,
        pending: VirtualRequest[Any],
        shard: int,
        nbytes: int,
        arrive: Callable[[], None],
        free: bool,
    ) -> None:
        """Send a message from a worker to a shard, as soon as its earlier messages to it have left."""
        rank = pending.rank
        queue = self._queues.get((rank, shard))

        def start() -> None:
            pending.begin()
            self._send(rank, self._nodes[shard], nbytes, arrive, free, left)

        def left() -> None:
            waiting = self._queues[rank, shard]
            waiting.pop(0)() if waiting else self._queues.pop((rank, shard))

        if queue is not None:
            queue.append(start)
            return
        self._queues[rank, shard] = []
        start()

    def _send(
        self,
        source: int,
        target: int,
        nbytes: int,
        arrive: Callable[[], None],
        free: bool,
        left: Callable[[], None] = lambda: None,
    ) -> None:
        """Send a message; call `left` when its bytes have left, and `arrive` one latency later."""
        scheduler = self.scheduler
        if free or source == target:
            scheduler.at(scheduler.now, arrive)
            left()
            return
        if source < len(self.ledgers):
            self.ledgers[source].sent_even_paused(nbytes)  # also while the ledger of its worker is paused
        else:
            self.ledgers[target].server_sent(nbytes)
        transfer, latency_s = scheduler.network.message(source, target, nbytes)

        def bytes_have_left() -> None:
            scheduler.at(scheduler.now + latency_s, arrive)
            left()

        scheduler.transfer(transfer, bytes_have_left)


class VirtualTransport:
    """One worker's transport to the virtual server."""

    def __init__(self, rank: int, server: VirtualServer) -> None:
        self._rank = rank
        self._server = server

    @property
    def shards(self) -> int:
        return self._server.size

    @property
    def joined_clock(self) -> int:
        return self._server.joined_clock(self._rank)

    def request(
        self,
        operation: Operation,
        messages: Sequence[ClientMessage],
        finish: Callable[[list[Any]], T],
    ) -> Pending[T]:
        return self._server.request(self._rank, operation, messages, finish)

    def read(self, into: list[Tensors]) -> Pending[None]:
        self._server.read(into)
        return Arrived(None)


class _Awaited(NamedTuple):
    """A message that has no answer yet."""

    message: ClientMessage
    answered: Callable[[Answer], None]
    free: bool  # whether it belongs to an evaluation: it then takes no time
    request: VirtualRequest[Any]


def _key(message: ClientMessage | Answer) -> Hashable:
    """Return a key by which a shard's answer is matched to its message."""
    match message:
        case Push() | PushAck():
            return "push", message.worker, message.clock
        case Reduce() | ReduceReply():
            return "reduce", message.worker, message.number
        case Pull() | PullReply():
            return "pull", message.worker
        case Save() | SaveReply():
            return "save", message.worker, message.part
        case _:
            return "load", message.worker


def _surely_finite(messages: Sequence[ClientMessage]) -> bool | None:
    """Return True if the parts of a push are finite, by one sum for all shards; None: each shard looks.

    A sum of magnitudes bounds the sum by which a shard would decide.
    """
    parts = [part for push in messages if isinstance(push, Push) and not push.codec for part in push.update]
    same_dtype = len({part.dtype for part in parts}) == 1
    return (is_finite([torch.cat(parts).abs_()]) or None) if same_dtype else None


def _nbytes(message: ClientMessage) -> int:
    match message:
        case Push():
            return sum(tensor.nbytes for tensor in message.update)
        case Reduce():
            return message.tensor.nbytes
        case Load():
            return sum(tensor.nbytes for tensor in message.tensors)
        case _:
            return REQUEST_BYTES


def _tensor_bytes(message: ClientMessage) -> int:
    """Return the bytes of tensors that travel with a message, and back with its answer."""
    outgoing = 0 if isinstance(message, Pull | Save) else _nbytes(message)
    return outgoing + sum(tensor.nbytes for tensor in _incoming(message))


def _incoming(message: ClientMessage) -> Tensors:
    """Return the worker's memory for the answer."""
    match message:
        case Pull() | Save():
            return message.into
        case Reduce():
            return [message.tensor]
        case _:
            return []


def _reason(message: ClientMessage) -> str:
    """Describe what a worker waits for, to be shown on deadlock."""
    match message:
        case Push():
            return f"its push number {message.clock} to arrive"
        case Pull():
            return f"the server to admit it at clock {message.clock}"
        case Reduce():
            return f"the server to complete reduction number {message.number}"
        case _:
            return "the server's checkpoint"
