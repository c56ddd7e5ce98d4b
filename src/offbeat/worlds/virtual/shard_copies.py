"""Copies of virtual shards at the next host, so that no acknowledged update is lost; as over processes.

    shard          push → apply, record the effect → … the copy has it → acknowledge the push
    its copy       the effects that were recorded meanwhile, in one batch → apply → acknowledge the batch

What is recorded, and whether a strategy can be followed, is what the real shards' journal says. An update
travels uncompressed, whatever its push had. Until a worker's push is acknowledged, the shard handles none of
its later messages, since a connection is served by one thread. Effects without an update cost nothing, nor
does the first copy of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from offbeat.errors import OffbeatError, SettingError
from offbeat.server.journal import Effect
from offbeat.server.messages import Push, PushAck
from offbeat.server.server import ParameterServer
from offbeat.worlds.virtual.messages import ShardRequest
from offbeat.worlds.virtual.scheduler import Scheduler

Sent = Callable[[int, int, int], None]
"""A shard sends bytes to another shard for a worker: shard, worker, bytes."""
Work = Callable[[int, int], float]
"""A shard applies an update of so many bytes to the copy that it keeps; return when it is done."""


class ShardCopies:
    """The copy of each shard, and what waits until it is complete."""

    def __init__(
        self,
        scheduler: Scheduler,
        shards: Sequence[ParameterServer],
        nodes: Sequence[int],
        *,
        sent: Sent,
        work: Work,
        acknowledge: Callable[[int, list[PushAck]], None],
        handle: Callable[[ShardRequest[Any], list[int]], None],
    ) -> None:
        if len(set(nodes)) < 2:
            raise SettingError(
                "a copy of each shard needs two hosts: a single one has no other to keep its copies. Take "
                "`copies` out of [shards], or let [server] have `count = 2`"
            )
        if not shards[0].aggregation.can_be_followed:
            raise OffbeatError(
                "this strategy, with these settings, cannot keep copies of its shards: take `copies` out of "
                "[shards]"
            )
        self._scheduler = scheduler
        self._nodes = nodes
        self._sent, self._work = sent, work
        self._acknowledge, self._handle = acknowledge, handle
        count = len(nodes)
        pieces = count // len(set(nodes))
        self._second = [(shard + pieces) % count for shard in range(count)]  # keeps a shard's copy
        self._queued: list[list[int]] = [[] for _ in nodes]  # bytes of effects that are not sent yet
        self._recorded = [0] * count  # effects, by shard
        self._kept = [0] * count  # those that the copy has
        self._in_flight = [0] * count  # those of the batch that is under way
        self._to_send: dict[int, None] = {}  # shards with queued effects and no batch under way, in order
        self._acks: list[list[tuple[int, PushAck]]] = [[] for _ in nodes]  # with the effect that each awaits
        self._held: dict[tuple[int, int], list[ShardRequest[Any]]] = {}  # by worker and shard: after a push
        for shard, server in enumerate(shards):
            server.aggregation.journal = partial(self._record, shard)

    def hold(self, request: ShardRequest[Any], shard: int) -> bool:
        """Return whether a message has to wait, since an earlier push of its worker is not acknowledged."""
        if request.free:
            return False
        place = request.rank, shard
        if place in self._held:
            self._held[place].append(request)
            return True
        if isinstance(request.messages[shard], Push):
            self._held[place] = []
        return False

    def ack(self, shard: int, answer: PushAck) -> None:
        """Acknowledge a push that the shard has handled, once the copy has all effects up to now."""
        self._acks[shard].append((self._recorded[shard], answer))
        if self._kept[shard] == self._recorded[shard]:
            self._scheduler.at(self._scheduler.now, partial(self._release, shard))

    def send(self) -> None:
        """Send what an event has recorded, of each shard without a batch under way."""
        if not self._to_send:
            return
        shards = list(self._to_send)
        self._to_send = {}
        paths = tuple([(self._nodes[shard], self._nodes[self._second[shard]]) for shard in shards])
        sizes = tuple([sum(self._queued[shard]) for shard in shards])
        for shard in shards:
            self._in_flight[shard] = len(self._queued[shard])
            self._queued[shard] = []

        def arrived(parts: list[int]) -> None:
            for part in parts:
                done_s = self._work(self._second[shards[part]], sizes[part])
                self._scheduler.at(done_s, partial(self._answer, shards[part]))

        self._scheduler.send(paths, sizes, lambda parts: None, arrived)

    def _record(self, shard: int, effect: Effect) -> None:
        """Queue an effect for the copy; it is sent when the event ends."""
        if not effect.kind.has_update:
            return
        nbytes = sum([part.nbytes for part in effect.update])
        self._sent(shard, next(iter(effect.clocks)), nbytes)
        self._recorded[shard] += 1
        self._queued[shard].append(nbytes)
        if not self._in_flight[shard]:
            self._to_send[shard] = None

    def _answer(self, shard: int) -> None:
        """Let the copy acknowledge a batch, which takes the latency alone."""
        path = (self._nodes[self._second[shard]], self._nodes[shard])
        self._scheduler.send((path,), (0,), lambda parts: None, lambda parts: self._keep(shard))

    def _keep(self, shard: int) -> None:
        """Count the batch as kept, and go on with what has waited for it."""
        self._kept[shard] += self._in_flight[shard]
        self._in_flight[shard] = 0
        if self._queued[shard]:
            self._to_send[shard] = None
        self._release(shard)

    def _release(self, shard: int) -> None:
        """Acknowledge the pushes whose effects are kept, and handle what these workers have sent since."""
        kept = self._kept[shard]
        ready = [answer for position, answer in self._acks[shard] if position <= kept]
        self._acks[shard] = [each for each in self._acks[shard] if each[0] > kept]
        self._acknowledge(shard, ready)  # this sends the next batch, too
        for answer in ready:
            for request in self._held.pop((answer.worker, shard), ()):
                self._handle(request, [shard])
