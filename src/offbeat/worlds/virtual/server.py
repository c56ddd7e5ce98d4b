"""The virtual world's parameter server: shards that are driven by messages which take their time.

A shard stands beside each of the first workers (its traffic goes through that worker's NIC) or, where the
cluster describes servers, on a machine of its own. The shards are the same state machines as the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from offbeat.codecs import Codec
from offbeat.core.ledger import Ledger
from offbeat.core.port import Op, PullResult
from offbeat.core.strategy import Strategy
from offbeat.errors import OffbeatError
from offbeat.server.messages import (
    Join,
    JoinAck,
    Leave,
    Message,
    Pull,
    PullReply,
    Push,
    PushAck,
    Reduce,
    ReduceReply,
    Tensors,
    Tick,
)
from offbeat.server.optimizer_spec import OptimizerSpec, make_apply
from offbeat.server.packets import allocate, decode, encode
from offbeat.server.server import ParameterServer, ShardState, shard_bounds, split_shards
from offbeat.worlds.virtual.cluster import Cluster
from offbeat.worlds.virtual.scheduler import Event, Scheduler

T = TypeVar("T")
MOST_SHARDS = 16
REQUEST_BYTES = 64  # what asking for weights puts on the wire


class VirtualServer:
    """All shards together, as the workers' ports see them."""

    def __init__(
        self, events: Scheduler, cluster: Cluster, strategy: Strategy[Any], ledgers: list[Ledger]
    ) -> None:
        self._events = events
        self._strategy = strategy
        self._ledgers = ledgers
        self.bytes_sent = 0  # by servers on machines of their own
        network = events.network
        dedicated = [network.server(k) for k in range(network.servers)] if cluster.server else []
        self._nodes = dedicated or list(range(min(cluster.size, MOST_SHARDS)))
        self.shards: list[ParameterServer[Any]] = []
        # Messages of one worker to one shard keep their order: here they wait for the one that is on its way.
        self._queues: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self._computed_s: dict[int, float] = {}  # each worker's computing until its last push
        self._starts: dict[int, int] = {}  # the server's clock at which each worker's own starts
        self._clocks: dict[int, int] = {}  # each worker's latest push, as the server counts
        self._refused: set[tuple[int, int]] = set()  # worker and clock
        self._receipts: dict[tuple[int, int], _Countdown] = {}  # what is still to come for a push, by these
        self._awaited: dict[tuple[int, int], tuple[Callable[[Tensors, PullReply], None], bool]] = {}
        self._numbers: dict[int, int] = {}  # of each worker's latest sum
        self._terms: dict[tuple[int, int, int], tuple[Tensor, _Countdown]] = {}  # by worker, shard and number
        self._wakes: dict[int, float | None] = {}  # when each shard is to be woken

    def open(self, weights: Tensors, optimizer: OptimizerSpec | None) -> None:
        """Take the weights to start with, and the optimizer if it is the server's, and let all workers in."""
        for shard, share in enumerate(split_shards(weights, len(self._nodes))):
            memory = ShardState([part.clone() for part in share])
            plan = optimizer and optimizer.share(shard_bounds(weights, shard, len(self._nodes)))
            self.shards.append(self._strategy.server(memory, make_apply(plan)))
        for worker in range(len(self._ledgers)):
            self.tell(Join(worker=worker))

    def tell(self, message: Join | Leave) -> None:
        for shard in range(len(self.shards)):
            self._handle(shard, message)

    def leave(self, worker: int) -> None:
        self.tell(Leave(worker=worker, at_s=self._events.now))

    def join(self, worker: int) -> None:
        """A worker comes back, as a new one: its own count starts anew where the slowest stands."""
        self._starts.pop(worker, None)
        self._clocks.pop(worker, None)
        self.tell(Join(worker=worker))

    def rest(self, worker: int) -> None:
        """A worker pushes nothing until all have met: nobody is to wait for its clock."""
        self.leave(worker)

    def go_on(self, worker: int) -> None:
        """All have met: its clock is where it was."""
        self.tell(Join(worker=worker, clock=self._clocks.get(worker, 0)))

    def push(
        self, rank: int, update: Tensors, clock: int, report: Sequence[float] = (), form: int = 0
    ) -> Event[bool]:
        count = clock  # as the worker counts
        clock = self._clocks[rank] = clock + self._starts[rank]
        trip: PendingRequest[bool] = self._trip(rank, "push", count, f"its push number {clock} to arrive")

        def finish() -> None:
            del self._receipts[rank, clock]
            trip.land((rank, clock) not in self._refused)

        self._receipts[rank, clock] = _Countdown(len(self._nodes), finish)
        before_s, self._computed_s[rank] = self._computed_s.get(rank, 0.0), self._ledgers[rank].compute_s
        spent_s = self._computed_s[rank] - before_s
        for shard, share in enumerate(split_shards(update, len(self._nodes))):
            nbytes = sum(part.nbytes for part in share)
            if form:
                share, nbytes = round_trip(self._strategy.forms[form - 1], share, count)

            def arrive(shard: int = shard, share: Tensors = share) -> None:
                now_s = self._events.now
                push = Push(
                    worker=rank,
                    clock=clock,
                    update=share,
                    report=tuple(report),
                    at_s=now_s,
                    spent_s=spent_s,
                )
                self._handle(shard, push)

            self._post(trip, shard, nbytes, arrive)
        return trip

    def combine(self, rank: int, tensor: Tensor, op: Op) -> Event[Tensor]:
        number = self._numbers[rank] = self._numbers.get(rank, 0) + 1
        self._ledgers[rank].combined += tensor.nbytes
        reason = f"the server to have its sum number {number}"
        trip: PendingRequest[Tensor] = self._trip(rank, "combine", number, reason)
        arrivals = _Countdown(len(self._nodes), lambda: trip.land(tensor))
        for shard, (share,) in enumerate(split_shards([tensor], len(self._nodes))):

            def arrive(shard: int = shard, share: Tensor = share) -> None:
                if not self.shards[shard].sums.expects(rank, number):
                    raise OffbeatError(f"worker {rank} came back, but the server has no weights to give it")
                self._handle(shard, Reduce(worker=rank, number=number, op=op, tensor=share))

            self._terms[rank, shard, number] = (share, arrivals)
            self._post(trip, shard, share.nbytes, arrive)
        return trip

    def _bring(self, shard: int, total: ReduceReply) -> None:
        share, arrivals = self._terms.pop((total.worker, shard, total.number))
        copy = total.tensor.clone()

        def arrive() -> None:
            share.copy_(copy)
            arrivals()

        self._send(self._nodes[shard], total.worker, copy.nbytes, arrive)

    def pull(self, rank: int, into: Tensors, clock: int | None, part: int = 0) -> Event[PullResult]:
        count = clock  # as the worker counts
        clock = None if clock is None else clock + self._starts[rank]
        reason = f"the server to let it go on from clock {clock}"
        trip: PendingRequest[PullResult] = self._trip(rank, "pull", count, reason)
        free = self._ledgers[rank].is_paused  # an evaluation looks, and costs nothing
        replies: dict[int, PullReply] = {}

        def finish() -> None:
            behind = max(reply.staleness for reply in replies.values())
            if clock is not None:
                self._ledgers[rank].record_staleness(behind)
            trip.land(PullResult(behind, replies[0].hint))

        arrivals = _Countdown(len(self._nodes), finish)
        for shard, share in enumerate(split_shards(into, len(self._nodes))):

            def arrive(
                weights: Tensors, reply: PullReply, shard: int = shard, share: Tensors = share
            ) -> None:
                torch._foreach_copy_(share, weights)
                replies[shard] = reply
                arrivals()

            self._awaited[rank, shard] = (arrive, free)
            ask = partial(self._handle, shard, Pull(worker=rank, clock=clock, part=part))
            self._post(trip, shard, REQUEST_BYTES, ask, free)
        return trip

    def _handle(self, shard: int, message: Message) -> None:
        server = self.shards[shard]
        for answer in server.handle(message):
            if (
                isinstance(answer, JoinAck) and answer.worker not in self._clocks
            ):  # each shard has a slowest of its own, at this moment
                self._starts[answer.worker] = max(self._starts.get(answer.worker, 0), answer.clock)
            if isinstance(answer, PushAck):
                self._acknowledge(answer)
            if isinstance(answer, ReduceReply):
                self._bring(shard, answer)
            if not isinstance(answer, PullReply):
                continue
            arrive, free = self._awaited.pop((answer.worker, shard))
            weights = [weight.clone() for weight in answer.weights]  # as they are now, whoever pushes next
            nbytes = sum(weight.nbytes for weight in weights)
            if self._strategy.answered_in is not None and not answer.for_evaluation:
                weights, nbytes = round_trip(self._strategy.answered_in, weights, answer.staleness)
            bring = partial(arrive, weights, answer)
            self._send(self._nodes[shard], answer.worker, nbytes, bring, free)
        wake_at = server.rule.wake_at(server.state)
        if wake_at is not None and wake_at != self._wakes.get(shard):
            tick = partial(self._handle, shard, Tick(at_s=wake_at))
            self._events.at(max(wake_at, self._events.now), tick)
        self._wakes[shard] = wake_at

    def _acknowledge(self, receipt: PushAck) -> None:
        """Several shards may refuse their share of one push: it counts once."""
        push = (receipt.worker, receipt.clock)
        if receipt.refused and push not in self._refused:
            self._refused.add(push)
            self._ledgers[receipt.worker].refused += 1
        self._receipts[push]()

    def _post(
        self,
        trip: PendingRequest[Any],
        shard: int,
        nbytes: int,
        arrive: Callable[[], None],
        free: bool = False,
    ) -> None:
        """From a worker to a shard, once what it sent there before has arrived."""
        rank = trip.rank
        queue = self._queues.get((rank, shard))

        def go() -> None:
            trip.begin()
            self._send(rank, self._nodes[shard], nbytes, arrived, free)

        def arrived() -> None:
            arrive()
            waiting = self._queues[rank, shard]
            waiting.pop(0)() if waiting else self._queues.pop((rank, shard))

        if queue is not None:
            queue.append(go)
            return
        self._queues[rank, shard] = []
        go()

    def _send(
        self, source: int, target: int, nbytes: int, arrive: Callable[[], None], free: bool = False
    ) -> None:
        if free or source == target:
            self._events.at(self._events.now, arrive)
            return
        if source < len(self._ledgers):
            self._ledgers[source].bytes_sent += nbytes  # a shard sends while its worker rests, too
        else:
            self.bytes_sent += nbytes
        self._events.transfer(self._events.network.send(source, target, nbytes), arrive)

    def _trip(self, rank: int, kind: str, number: int | None, reason: str) -> PendingRequest[Any]:
        return PendingRequest(
            self._events, self._ledgers[rank], (kind, "" if number is None else str(number)), reason
        )


class PendingRequest(Event[T]):
    """A push, a pull or a sum of one worker, to all shards and back."""

    __slots__ = ("_began_s", "_name")

    def __init__(self, events: Scheduler, ledger: Ledger, name: tuple[str, str], reason: str) -> None:
        super().__init__(events, ledger, lambda: reason)
        self._name = name
        self._began_s: float | None = None
        if not ledger.is_paused:
            ledger.under_way(+1)

    @property
    def rank(self) -> int:
        return self._ledger.rank

    def begin(self) -> None:
        """The first of it leaves; what was sent before may have kept it."""
        if self._began_s is None:
            self._began_s = self._scheduler.now

    def land(self, value: T) -> None:
        if not self._ledger.is_paused:
            assert self._began_s is not None
            self._ledger.under_way(-1)
            self._ledger.record_span(*self._name, self._began_s)
        self.succeed(value)


def round_trip(codec: Codec, parts: Tensors, count: int) -> tuple[Tensors, int]:
    """What arrives of these parts, and the bytes on the wire; what does not is left in them."""
    packets, arrived = allocate(codec, parts), [torch.zeros_like(part) for part in parts]
    encode(codec, parts, packets, count)
    decode(codec, packets, arrived)
    return arrived, sum(packet.nbytes for packet in packets)


class _Countdown:
    """Calls `done` when it has been called so many times."""

    def __init__(self, count: int, done: Callable[[], None]) -> None:
        self._left = count
        self._done = done

    def __call__(self) -> None:
        self._left -= 1
        if not self._left:
            self._done()
