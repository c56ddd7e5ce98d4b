"""ServerClient: a worker's side of the parameter server, without I/O, the same in both worlds.

The client cuts tensors into the shards' slices, converts the worker's clock to the server's, compresses
tensors, and counts staleness and refusals. A `Transport` carries the messages: over TCP, or through the
simulated network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from offbeat.codecs import Codec
from offbeat.core.finite import is_finite
from offbeat.core.ledger import Ledger
from offbeat.core.pending import Arrived, Pending
from offbeat.core.port import Lane, Op, PullResult
from offbeat.errors import OffbeatError
from offbeat.server.aggregation import NOT_FINITE
from offbeat.server.half import ServerHalf
from offbeat.server.messages import ClientMessage, Load, Pull, Push, Reduce, Save, Tensors, changed
from offbeat.server.packets import allocate, decode, encode
from offbeat.server.sharding import split_shards

T = TypeVar("T")
WATCHED = 100  # pushes, of which more than half must be finite


class Operation(NamedTuple):
    """Name of an operation, for the timeline."""

    kind: str
    number: str


class Transport(Protocol):
    """All shards of a server, as the client of one worker reaches them.

    It carries the messages of an operation to all shards together, because time, bytes and waits are counted
    per operation, not per shard.
    """

    @property
    def shards(self) -> int:
        """The number of shards."""
        ...

    @property
    def joined_clock(self) -> int:
        """The server's clock at which this worker joined, or last rejoined as a newcomer."""
        ...

    def request(
        self,
        operation: Operation,
        messages: Sequence[ClientMessage],
        finish: Callable[[list[Any]], T],
    ) -> Pending[T]:
        """Send one message to each shard; `finish` turns their answers into the result."""
        ...

    def read(self, into: list[Tensors]) -> Pending[None]:
        """Read each shard's weights as they are now, past the messages in progress."""
        ...


class ServerClient:
    """A worker's `ServerPort` and `ServerAdmin`."""

    def __init__(
        self,
        transport: Transport,
        half: ServerHalf,
        ledger: Ledger,
        *,
        worker: int,
        world: int,
        weights: Tensors,
        state_parts: int = 0,
    ) -> None:
        self.worker = worker  # its number, as the server knows it
        self._transport = transport
        self._half = half
        self._ledger = ledger
        self._world = world
        self._weights = weights
        self._state_parts = state_parts  # of the server's optimizer
        self._clock_offset: int | None = None  # from the strategy's clock to the server's
        self._computed_s = 0.0  # until the last push
        self._reductions = 0  # number of reductions so far
        self._latest: deque[bool] = deque(maxlen=WATCHED)  # whether each of the latest updates was not finite
        self._bad = 0  # the number of those
        self._sliced: dict[str, tuple[list[Any], list[Tensors]]] = {}  # the latest push and pull, by shard
        self._packets: dict[tuple[str, Codec], list[Tensors]] = {}  # by shard; allocated once

    def push(
        self, update: Tensors, clock: int, *, report: Sequence[float] = (), codec: int = 0
    ) -> Pending[bool]:
        joined = self._transport.joined_clock
        # A server that had trained on without this worker has let it rejoin at a later clock.
        if self._clock_offset is None or clock + self._clock_offset <= joined:
            self._clock_offset = joined + 1 - clock
        before_s, self._computed_s = self._computed_s, self._ledger.compute_s
        push = Push(
            worker=self.worker,
            clock=clock + self._clock_offset,
            update=[],
            report=tuple(report),
            codec=codec,
            spent_s=self._computed_s - before_s,
        )
        messages = [changed(push, update=payload) for payload in self._payloads(update, clock, codec)]

        def finish(acks: list[Any]) -> bool:
            refusals = [ack.refused for ack in acks if ack.refused]
            if refusals:  # one refusal, however many shards refused
                self._ledger.count_refusal()
            self._watch_refusals(any(NOT_FINITE in reason for reason in refusals))
            return not refusals

        return self._transport.request(Operation("push", str(clock)), messages, finish)

    def pull(self, into: Tensors, clock: int | None) -> Pending[PullResult]:
        if self._clock_offset is None and clock is not None:  # after a restart, before the first push
            self._clock_offset = self._transport.joined_clock - clock
        server_clock = None if clock is None else clock + (self._clock_offset or 0)
        shards, codec = self._transport.shards, None if clock is None else self._half.pull_codec
        slices = split_shards(into, shards) if clock is None else self._slices("pull", into)
        received = slices if codec is None else self._packets_for("pull", codec, slices)
        pull = Pull(worker=self.worker, clock=server_clock)
        messages = [changed(pull, into=part) for part in received]

        def finish(replies: list[Any]) -> PullResult:
            if codec is not None:
                for packets, part in zip(received, slices, strict=True):
                    decode(codec, packets, part)
            staleness = max([reply.staleness for reply in replies])
            if clock is not None:
                self._ledger.record_staleness(staleness)
                self._ledger.pushes_seen = replies[0].pushes
            return PullResult(staleness, hint=replies[0].hint)

        number = "" if clock is None else str(clock)
        return self._transport.request(Operation("pull", number), messages, finish)

    def read(self, into: Tensors) -> Pending[None]:
        return self._transport.read(split_shards(into, self._transport.shards))

    def pull_state(self, part: int, into: Tensors) -> Pending[None]:
        slices = split_shards(into, self._transport.shards)
        messages = [Save(worker=self.worker, part=part, into=each) for each in slices]
        return self._transport.request(Operation("save", str(part)), messages, lambda _: None)

    def all_reduce(self, tensor: Tensor, op: Op = Op.MEAN, lane: Lane = Lane.FRONT) -> Pending[Tensor]:
        if self._world == 1:
            return Arrived(tensor)
        self._reductions += 1
        self._ledger.count_server_reduce(tensor.nbytes)
        messages = [
            Reduce(worker=self.worker, number=self._reductions, op=op, tensor=part)
            for (part,) in split_shards([tensor], self._transport.shards)
        ]
        operation = Operation("combine", str(self._reductions))
        return self._transport.request(operation, messages, lambda _: tensor)

    def _watch_refusals(self, not_finite: bool) -> None:
        """Raise an error if most of the latest updates were not finite: nothing is learned any more."""
        if len(self._latest) == WATCHED:
            self._bad -= self._latest[0]
        self._latest.append(not_finite)
        self._bad += not_finite
        if len(self._latest) == WATCHED and self._bad > WATCHED // 2:
            raise OffbeatError(
                f"the server refused {self._bad} of this worker's last {WATCHED} updates, because they were "
                "not finite: training has diverged. Lower the learning rate, or look for a worker with "
                "another"
            )

    def rejoin(self) -> None:
        """Forget the clock offset: the next operation maps the strategy's clock to the server's."""
        self._clock_offset = None

    # --- for checkpoints

    async def save(self) -> Tensors:
        saved = [torch.empty_like(weight) for weight in self._weights]
        await self.pull(saved, None)
        for part in range(1, 1 + self._state_parts):
            flats = [torch.empty_like(weight) for weight in self._weights]
            await self.pull_state(part, flats)
            saved += flats
        return saved

    async def load(self, tensors: Tensors, initial: bool = False) -> None:
        if not is_finite(tensors[: len(self._weights)]):
            raise OffbeatError("the model's weights are not finite: a server does not accept them")
        for part in range(len(tensors) // len(self._weights)):
            flats = tensors[part * len(self._weights) : (part + 1) * len(self._weights)]
            slices = split_shards(flats, self._transport.shards)
            messages = [Load(worker=self.worker, part=part, tensors=each, initial=initial) for each in slices]
            await self._transport.request(Operation("load", str(part)), messages, lambda _: None)

    def _payloads(self, update: Tensors, clock: int, codec: int) -> list[Tensors]:
        """Return the payload for each shard: slices of the update, or packets of them."""
        slices = self._slices("push", update)
        if not codec:
            return slices
        push_codec = self._half.push_codecs[codec - 1]
        packets = self._packets_for("push", push_codec, slices)
        for part, packed in zip(slices, packets, strict=True):
            encode(push_codec, part, packed, clock)
        return packets

    def _slices(self, kind: str, flats: Tensors) -> list[Tensors]:
        """Return each shard's slices; those of the latest push and pull are kept, for the next ones."""
        memory = [(flat.data_ptr(), flat.numel(), flat.dtype) for flat in flats]
        latest, slices = self._sliced.get(kind, ([], []))
        if latest != memory:  # the slices keep their memory alive, so that no other tensor is where it was
            slices = split_shards(flats, self._transport.shards)
            self._sliced[kind] = memory, slices
        return slices

    def _packets_for(self, kind: str, codec: Codec, slices: list[Tensors]) -> list[Tensors]:
        if (kind, codec) not in self._packets:
            self._packets[kind, codec] = [allocate(codec, part) for part in slices]
        return self._packets[kind, codec]
