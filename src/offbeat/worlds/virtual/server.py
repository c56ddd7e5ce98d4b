"""Parameter server in virtual time: shards that messages reach through the simulated network.

Shards run beside each of the first workers, through whose NIC their traffic passes; if the cluster describes
servers, they run on machines of their own. How many a host has is as over processes (`server/pieces.py`). The
shards are the same state machines as the real ones, and workers use the same client.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from offbeat.core.ledger import Ledger
from offbeat.errors import OffbeatError
from offbeat.server.aggregation import Aggregation
from offbeat.server.apply import make_apply
from offbeat.server.client import Operation
from offbeat.server.half import ServerHalf
from offbeat.server.messages import (
    ClientMessage,
    Join,
    JoinAck,
    Leave,
    LoadAck,
    Message,
    PullReply,
    Push,
    PushAck,
    Reduce,
    ReduceReply,
    SaveReply,
    Tensors,
    Tick,
    stamp,
)
from offbeat.server.optimizer_spec import OptimizerSpec
from offbeat.server.packets import decode
from offbeat.server.pieces import pieces_for
from offbeat.server.server import ParameterServer
from offbeat.server.sharding import ShardState, shard_bounds, split_shards
from offbeat.worlds.virtual.cluster import Cluster
from offbeat.worlds.virtual.computing import Core
from offbeat.worlds.virtual.costs import CodecCost, ShardCost
from offbeat.worlds.virtual.messages import (
    Line,
    ShardRequest,
    incoming,
    key,
    surely_finite,
    tensor_bytes,
    wait_in,
)
from offbeat.worlds.virtual.network import Paths
from offbeat.worlds.virtual.replies import Reply, copy_tensors
from offbeat.worlds.virtual.scheduler import Event, Scheduler
from offbeat.worlds.virtual.shard_copies import ShardCopies

T = TypeVar("T")
MOST_HOSTS = 16


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
        self._dedicated = bool(dedicated)
        self._hosts = dedicated or list(range(min(cluster.size, MOST_HOSTS)))  # nodes
        self._paths: dict[int, Paths] = {}  # from a worker to every shard
        # Messages of one worker to the shards of one host leave in order. By worker and host: None if none
        # leaves, or what waits until an earlier one has left, with the shard that it goes to.
        self._lines: dict[int, list[Line | None]] = {}
        self._joined_clocks: dict[int, int] = {}  # at which each worker joined
        self._clocks: dict[int, int] = {}  # of each worker's latest push
        self._open: dict[Hashable, ShardRequest[Any]] = {}  # by message
        self._outbox: list[Reply] = []  # answers that leave at the end of the event
        self._uncopied: list[Reply] = []  # answers with tensors, which are copied at the end of the event
        self._wake_times: dict[int, float | None] = {}  # of the next Tick of each shard
        self._cores: dict[int, Core] = {}  # of each worker
        self._push_costs: tuple[CodecCost, ...] = ()  # of the codecs of pushes
        self._shard_cost = cluster.shards or ShardCost()
        self._busy_until_s = [0.0] * len(self._hosts)
        self._copies: ShardCopies | None = None

    def add_worker(self, rank: int, core: Core, push_costs: tuple[CodecCost, ...]) -> None:
        """Add a worker's processor: it encodes, and is held up by a shard beside it."""
        self._cores[rank] = core
        self._push_costs = push_costs  # the same for all workers

    @property
    def size(self) -> int:
        """Number of shards."""
        return len(self._nodes)

    def joined_clock(self, worker: int) -> int:
        return self._joined_clocks[worker]

    def open(self, weights: Tensors, optimizer: OptimizerSpec | None) -> None:
        """Set the initial weights, and the optimizer if the server owns it, and let all workers join."""
        sizes = [weight.numel() for weight in weights]
        self._place(sum(weight.nbytes for weight in weights))
        for shard, slices in enumerate(split_shards(weights, self.size)):
            state = ShardState([part.clone() for part in slices])
            spec = optimizer and optimizer.for_shard(shard_bounds(sizes, shard, self.size))
            self.shards.append(ParameterServer(state, self._half, make_apply(spec)))
        self._costs = bool(self._shard_cost.apply_s or any(cost.decode_s for cost in self._push_costs))
        if self._shard_cost.copies:
            self._copies = ShardCopies(
                self.scheduler,
                self.shards,
                self._nodes,
                sent=self._send_copy,
                work=self._receive_copy,
                acknowledge=self._acknowledge,
                handle=self._handle_all,
            )
        self._wakes = type(self.shards[0].aggregation).wake_at is not Aggregation.wake_at
        for worker in range(len(self.ledgers)):
            self._broadcast(Join(worker=worker))

    def _place(self, nbytes: int) -> None:
        """Give each host its shards, for weights of so many bytes."""
        hosts = len(self._hosts)
        pieces = self._shard_cost.pieces or self._pieces_for(nbytes * self._half.wire_ratio)
        self._nodes = [node for node in self._hosts for _ in range(pieces)]  # of each shard
        self._host_of = [host for host in range(hosts) for _ in range(pieces)]
        self._every = list(range(hosts * pieces))  # shard
        self._beside: dict[int, list[int]] = {}  # the shards at each node that has any
        for shard, node in enumerate(self._nodes):
            self._beside.setdefault(node, []).append(shard)

    def _pieces_for(self, nbytes: float) -> int:
        """Return the number of shards on each host for so many bytes on the wire, as over processes."""
        workers = len(self.ledgers)
        if len(self._hosts) == 1 or self._dedicated or not self._half.cuts_anywhere:
            return 1
        return pieces_for(nbytes, len(self._hosts), workers, self.scheduler.network.ring_rate(range(workers)))

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
        first, ledger, core = messages[0], self.ledgers[rank], self._cores[rank]
        if isinstance(first, Push):
            self._clocks[rank] = first.clock
        for shard in self._beside.get(rank, ()):
            ledger.sent(tensor_bytes(messages[shard]), left_host=0)  # both ways
        request: ShardRequest[T] = ShardRequest(self.scheduler, ledger, operation, messages, finish)
        self._open[key(first)] = request
        request.finite = surely_finite(messages)
        if isinstance(first, Push) and first.codec:
            request.messages = [self._decoded(shard, push) for shard, push in enumerate(messages)]
            cost = self._push_costs[first.codec - 1]
            request.decode_s = cost.decode_s
            core.encode(cost, sum(request.sizes))
        if core.delay_s and not request.free:  # it leaves when all is encoded
            self.scheduler.at(self.scheduler.now + core.delay_s, partial(self._enqueue, request))
        else:
            self._enqueue(request)
        if self._shard_cost.exchange_s and not request.free:
            core.owe(self._shard_cost.exchange_s * sum(map(tensor_bytes, messages)))
        return request

    def _enqueue(self, request: ShardRequest[Any]) -> None:
        """Send a request's messages to the hosts to which none of this worker leaves; the others wait."""
        line = self._lines.setdefault(request.rank, [None] * len(self._hosts))
        free = []
        for shard, host in enumerate(self._host_of):
            waiting = line[host]
            if waiting is None:
                line[host] = []
                free.append(shard)
            else:
                wait_in(waiting, request, shard)
        self._send(request, free)

    def _decoded(self, shard: int, push: ClientMessage) -> Push:
        """Return a push with its update decoded; at once, because the packets are reused."""
        assert isinstance(push, Push)
        update = [torch.zeros_like(weight) for weight in self.shards[shard].shard.weights]
        decode(self._half.push_codecs[push.codec - 1], push.update, update)
        return replace(push, update=update, codec=0)

    def _send(self, request: ShardRequest[Any], shards: list[int]) -> None:
        """Send a request's messages to these shards now; what waits for that follows when they have left."""
        if not shards:
            return
        request.begin()
        rank, scheduler = request.rank, self.scheduler
        beside = self._every if request.free else self._beside.get(rank, ())
        here = [shard for shard in shards if shard in beside] if beside else []
        if here:
            scheduler.at(scheduler.now, partial(self._arrive, request, here))
            self._left(rank, here)
        away = [shard for shard in shards if shard not in beside] if beside else shards
        if away:
            sizes = tuple([request.sizes[shard] for shard in away])
            self.ledgers[rank].sent_even_paused(sum(sizes))  # also while the ledger of its worker is paused
            scheduler.send(
                self._paths_to(rank, away),
                sizes,
                lambda parts: self._left(rank, [away[part] for part in parts]),
                lambda parts: self._arrive(request, [away[part] for part in parts]),
            )

    def _paths_to(self, rank: int, shards: list[int]) -> Paths:
        if len(shards) < self.size:
            return tuple([(rank, self._nodes[shard]) for shard in shards])
        if rank not in self._paths:
            self._paths[rank] = tuple([(rank, node) for node in self._nodes])
        return self._paths[rank]

    def _left(self, rank: int, shards: list[int]) -> None:
        """Send the next messages to the hosts of these shards, whose messages have left."""
        line = self._lines[rank]
        following: dict[ShardRequest[Any], list[int]] = {}
        for shard in shards:
            host = self._host_of[shard]
            if waiting := line[host]:
                request, ready_shard = waiting.pop(0)
                following.setdefault(request, []).append(ready_shard)
            else:
                line[host] = None
        for request, ready in following.items():
            self._send(request, ready)

    def _arrive(self, request: ShardRequest[Any], shards: list[int]) -> None:
        """Let shards handle their messages of a request, each after its earlier ones."""
        request.arrive()
        if self._shard_cost.exchange_s and not request.free:
            for shard in shards:
                self._exchange(shard, request.exchange_bytes(shard))
        if request.free or not self._costs:
            self._handle_all(request, shards)
            return
        for shard in shards:
            done_s = self._work(shard, self._work_s(request, shard))
            self.scheduler.at(done_s, partial(self._handle_all, request, [shard]))

    def _work(self, shard: int, seconds: float) -> float:
        """Let a shard work, after what its host has begun before; return when it is done."""
        host = self._host_of[shard]
        done_s = max(self.scheduler.now, self._busy_until_s[host]) + seconds
        self._busy_until_s[host] = done_s
        if (beside := self._cores.get(self._nodes[shard])) is not None:
            beside.take(self._shard_cost.beside * seconds)
        return done_s

    def _exchange(self, shard: int, nbytes: int) -> None:
        """Charge what a shard exchanges to the worker beside it."""
        if (beside := self._cores.get(self._nodes[shard])) is not None:
            beside.take(self._shard_cost.exchange_s * nbytes)

    def _send_copy(self, shard: int, worker: int, nbytes: int) -> None:
        self._exchange(shard, nbytes)
        self._count_sent(self._nodes[shard], worker, nbytes)

    def _receive_copy(self, shard: int, nbytes: int) -> float:
        self._exchange(shard, nbytes)
        return self._work(shard, self._shard_cost.apply_s * nbytes)

    def _count_sent(self, source: int, worker: int, nbytes: int) -> None:
        """Count what a shard sends for a worker: at the worker beside the shard, or as the server's."""
        if source < len(self.ledgers):
            self.ledgers[source].sent_even_paused(nbytes)
        else:
            self.ledgers[worker].server_sent(nbytes)

    def _work_s(self, request: ShardRequest[Any], shard: int) -> float:
        """Return the seconds that a shard takes for its message of a request."""
        message = request.messages[shard]
        if not isinstance(message, Push):
            return 0.0
        seconds = self._shard_cost.apply_s * sum([part.nbytes for part in message.update])
        return seconds + request.decode_s * request.sizes[shard]

    def _handle_all(self, request: ShardRequest[Any], shards: list[int]) -> None:
        """Let shards handle their messages of a request, and send what they answer."""
        now, finite = self.scheduler.now, request.finite
        for shard in shards:
            if self._copies is not None and self._copies.hold(request, shard):
                continue
            message = request.messages[shard]
            if isinstance(message, Push):
                stamp(message, at_s=now, finite=finite)
            elif isinstance(message, Reduce) and not self.shards[shard].aggregation.expects(
                message.worker, message.number
            ):
                raise OffbeatError(
                    f"worker {message.worker} came back, but the server has no weights to give it: it only "
                    "adds up gradients. Where workers come and go, use the strategy without a server, elastic"
                )
            self._handle(shard, message)
        self._send_answers()

    def _broadcast(self, message: Join | Leave) -> None:
        for shard in range(len(self.shards)):
            self._handle(shard, message)
        self._send_answers()

    def _tick(self, shard: int, at_s: float) -> None:
        self._handle(shard, Tick(at_s=at_s))
        self._send_answers()

    def _handle(self, shard: int, message: Message) -> None:
        server = self.shards[shard]
        for answer in server.handle(message):
            if self._copies is not None and isinstance(answer, PushAck):
                self._copies.ack(shard, answer)
            elif not isinstance(answer, JoinAck):
                self._answer(shard, answer)
            elif answer.worker not in self._clocks:  # shards may differ in their slowest worker
                self._joined_clocks[answer.worker] = max(
                    self._joined_clocks.get(answer.worker, 0), answer.clock
                )
        if not self._wakes:
            return
        wake_at = server.aggregation.wake_at(server.state)
        if wake_at is not None and wake_at != self._wake_times.get(shard):
            self.scheduler.at(max(wake_at, self.scheduler.now), partial(self._tick, shard, wake_at))
        self._wake_times[shard] = wake_at

    def _answer(self, shard: int, answer: PushAck | PullReply | ReduceReply | SaveReply | LoadAck) -> None:
        """Send an answer to its worker; of a receipt, which is short, only the latency counts."""
        request = self._open[key(answer)]
        request.answer()
        reply = Reply(request, shard, answer)
        if not isinstance(answer, (PushAck, LoadAck)):
            self._uncopied.append(reply)
        if request.free or self._nodes[shard] == request.rank:
            self.scheduler.at(self.scheduler.now, partial(self._deliver, [reply], [0]))
        else:
            self._outbox.append(reply)

    def _acknowledge(self, shard: int, answers: list[PushAck]) -> None:
        for answer in answers:
            self._answer(shard, answer)
        self._send_answers()

    def _send_answers(self) -> None:
        """Send the answers of an event, together, and what their copies lack."""
        if self._copies is not None:
            self._copies.send()
        if self._uncopied:
            copy_tensors(self._uncopied, self._half.pull_codec)
            self._uncopied = []
        if not self._outbox:
            return
        replies, self._outbox = self._outbox, []
        paths = tuple([(self._nodes[reply.shard], reply.request.rank) for reply in replies])
        sizes = tuple([sum([tensor.nbytes for tensor in reply.copies]) for reply in replies])
        for (source, target), nbytes in zip(paths, sizes, strict=True):
            if nbytes:
                self._count_sent(source, target, nbytes)
        self.scheduler.send(paths, sizes, lambda parts: None, partial(self._deliver, replies))

    def _deliver(self, replies: list[Reply], parts: list[int]) -> None:
        """Give workers the answers that have arrived."""
        into: Tensors = []
        copies: Tensors = []
        arrived = [replies[part] for part in parts]
        for reply in arrived:
            if reply.copies:
                into += incoming(reply.request.messages[reply.shard])
                copies += reply.copies
        if into:
            torch._foreach_copy_(into, copies)
        for reply in arrived:
            request = reply.request
            if request.take(reply.shard, reply.answer) and self._open[key(reply.answer)] is request:
                del self._open[key(reply.answer)]
