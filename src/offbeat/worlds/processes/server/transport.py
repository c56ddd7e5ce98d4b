"""A worker's side of the parameter server: push and pull, over ways to all shards."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat.codecs import Codec
from offbeat.core.finite import is_finite
from offbeat.core.port import Op, Pending, PullResult
from offbeat.errors import OffbeatError, RankLost
from offbeat.server.messages import Tensors
from offbeat.server.packets import allocate, decode, encode
from offbeat.server.server import split_shards
from offbeat.worlds.processes.port import ProcessPort
from offbeat.worlds.processes.server.channel import ClientIdentity, Request, ShardChannel
from offbeat.worlds.processes.server.supervisor import Supervisor
from offbeat.worlds.processes.server.wire import (
    HEADER,
    NOW,
    WAYS_TO_SUM,
    MessageType,
    encode_header,
    reduce_capacity,
)

log = logging.getLogger("offbeat")


class ServerLinks:
    """Push and pull, over ways to all shards. `beside` says which shard, if any, is of this host."""

    def __init__(
        self,
        port: ProcessPort,
        caller: ClientIdentity,
        shards: list[str],
        weights: Tensors,
        keeper: Supervisor | None = None,
        beside: int | None = None,
    ) -> None:
        self.worker = caller.worker  # its number, as the server knows it
        self._port = port
        self._keeper = keeper
        self._beside = beside
        self.ways = [ShardChannel(caller, shard, where) for shard, where in enumerate(shards)]
        self._restarted_at = max(way.clock for way in self.ways)
        self._ahead: int | None = None  # of the strategy's clock is the server's, by so much
        self._computed_s = 0.0  # until the last push
        self._sums = 0  # so far
        self._room_for_terms = min(map(reduce_capacity, split_shards(weights, len(self.ways))))
        # What travels does so from the CPU; from a GPU by way of pinned memory.
        self._outgoing = PinnedStaging(weights) if weights[0].is_cuda else None
        self._incoming = PinnedStaging(weights) if weights[0].is_cuda else None
        self._weights = weights
        self._packets: list[tuple[Codec, list[Tensors]]] = []  # of each form; for each shard, what travels
        self._answers: tuple[Codec, list[Tensors]] | None = None

    @property
    def filled(self) -> bool:
        """Whether the server has weights."""
        return all(way.filled for way in self.ways)

    @property
    def server_pid(self) -> int | None:
        """The process of the shard that this rank keeps."""
        return self._keeper.pid if self._keeper else None

    def travel(self, forms: Sequence[Codec], answered_in: Codec | None) -> None:
        """The codecs in which pushes and answers travel."""

        def rooms(codec: Codec, like: Tensors) -> tuple[Codec, list[Tensors]]:
            return codec, [allocate(codec, share) for share in split_shards(like, len(self.ways))]

        landing = self._incoming.room() if self._incoming else self._weights
        self._packets = [rooms(codec, self._weights) for codec in forms]
        self._answers = rooms(answered_in, landing) if answered_in else None

    def open(self, weights: Tensors, part: int = 0) -> None:
        """Give the server the weights to start with; then, if so, the parts of what its optimizer keeps."""
        if not is_finite(weights):
            raise OffbeatError("the model's weights are not finite: no server takes them")
        payload, ready = self._outgoing.fetch(weights) if self._outgoing else (weights, _at_once)
        errands = [
            (way, way.start(Request([encode_header(MessageType.OPEN, part), *share], [_room()], ready)))
            for way, share in zip(self.ways, split_shards(payload, len(self.ways)), strict=True)
        ]
        for way, errand in errands:
            if (lost := way.finish(errand, time.monotonic() + self._port.timeout_s)) is not None:
                raise lost

    def restart(self) -> None:
        """The server was opened anew, and counts from 0 again."""
        self._restarted_at, self._ahead, self._sums = 0, None, 0
        for way in self.ways:
            way.clock, way.pushes, way.filled = 0, 0, True

    def push(self, update: Tensors, clock: int, report: Sequence[float] = (), form: int = 0) -> Pending[bool]:
        if self._ahead is None:
            self._ahead = self._restarted_at + 1 - clock
        computed_s, self._computed_s = self._computed_s, self._port.ledger.compute_s
        head = encode_header(
            MessageType.PUSH, clock + self._ahead, int(1e9 * (self._computed_s - computed_s)), form
        )
        told = [head, torch.tensor(report, dtype=torch.float64)]
        errands, nbytes = [], 0
        payload, ready = self._payload(update, clock, form)
        for shard, share in enumerate(payload):
            errands.append(self.ways[shard].start(Request([*told, *share], [_room()], ready)))
            nbytes += self._away(shard, share)

        def land() -> bool:
            refused = False
            for way, errand in zip(self.ways, errands, strict=True):
                _, way.clock, not_taken, _ = errand.head
                way.pushes += 1
                refused = refused or bool(not_taken)
            self._count_hosted([errand.head[3] for errand in errands])
            if refused:
                self._port.ledger.count_refusal()
                log.warning(
                    "the server refused update %d of this worker: it is not finite, or too late", clock
                )
            return not refused

        return PendingRequest(
            self._port, ("push", str(clock)), self.ways, errands, nbytes, land, sends=nbytes
        )

    def pull(self, into: Tensors, clock: int | None, part: int = 0) -> Pending[PullResult]:
        if self._ahead is None and clock is not None:  # after a restart, before the first push
            self._ahead = self._restarted_at - clock
        landing = split_shards(self._incoming.room() if self._incoming else into, len(self.ways))
        packets = landing if self._answers is None or clock is None else self._answers[1]
        head = encode_header(MessageType.PULL, NOW if clock is None else clock + (self._ahead or 0), part)
        errands, nbytes = [], 0
        for shard, share in enumerate(packets):
            errands.append(self.ways[shard].start(Request([head], [_room(), *share])))
            nbytes += self._away(shard, share)

        def land() -> PullResult:
            if self._answers is not None and packets is not landing:
                for packed, share in zip(packets, landing, strict=True):
                    decode(self._answers[0], packed, share)
            if self._incoming is not None:
                self._incoming.bring(into)
            heads = [errand.head for errand in errands]
            self._count_hosted([head[2] for head in heads])
            behind = max(head[1] for head in heads)
            if clock is not None:
                self._port.ledger.record_staleness(behind)
            return PullResult(behind, hint=heads[0][3])

        return PendingRequest(
            self._port, ("pull", "" if clock is None else str(clock)), self.ways, errands, nbytes, land
        )

    def combine(self, tensor: Tensor, op: Op) -> Pending[Tensor]:
        self._sums += 1
        self._port.ledger.count_server_reduce(tensor.nbytes)
        payload = tensor.cpu() if tensor.is_cuda else tensor  # what comes back lies in the same memory
        code = WAYS_TO_SUM.index((tensor.dtype, op))
        errands, nbytes = [], 0
        for shard, (share,) in enumerate(split_shards([payload], len(self.ways))):
            if share.nbytes > self._room_for_terms:
                raise OffbeatError(f"{tensor.nbytes} bytes at once are more than the server has room for")
            head = encode_header(MessageType.TERM, self._sums, share.numel(), code)
            errands.append(self.ways[shard].start(Request([head, share], [_room(), share])))
            nbytes += self._away(shard, [share])

        def land() -> Tensor:
            if payload is not tensor:
                tensor.copy_(payload)
            self._count_hosted([errand.head[2] for errand in errands])
            return tensor

        name = ("combine", str(self._sums))
        return PendingRequest(self._port, name, self.ways, errands, 2 * nbytes, land, sends=nbytes)

    def _payload(self, update: Tensors, clock: int, form: int) -> tuple[list[Tensors], Callable[[], None]]:
        """What travels to each shard, and what waits until it is there."""
        if form:
            codec, packets = self._packets[form - 1]
            for share, packed in zip(split_shards(update, len(self.ways)), packets, strict=True):
                encode(codec, share, packed, clock)
            return [[packet.cpu() for packet in packed] for packed in packets], _at_once
        whole, ready = self._outgoing.fetch(update) if self._outgoing else (update, _at_once)
        return split_shards(whole, len(self.ways)), ready

    def leave(self) -> None:
        """Say goodbye to all shards. One that this rank started ends when nobody is left to serve."""
        for way in self.ways:
            way.leave()

    def close(self, patience_s: float) -> None:
        """Leave, and see the shard that this rank started end."""
        self.leave()
        if self._keeper is not None:
            self._keeper.release(patience_s)

    def _count_hosted(self, sent_away: list[int]) -> None:
        """The bytes of answers leave the shard's NIC, which the host's first worker accounts for."""
        if self._beside is not None and self._keeper is not None and sent_away[self._beside]:
            self._port.ledger.hosted(sent_away[self._beside])

    def _away(self, shard: int, share: Tensors) -> int:
        """The bytes that leave this host on the way to or from a shard."""
        return 0 if shard == self._beside else sum(part.nbytes for part in share)


def _room() -> Tensor:
    return torch.zeros(HEADER, dtype=torch.int64)


def _at_once() -> None:
    """What there is to wait for where nothing comes from a GPU."""


class PinnedStaging:
    """Pinned memory between a GPU and the wire."""

    def __init__(self, weights: Tensors) -> None:
        self._host = [torch.empty_like(w, device="cpu", pin_memory=True) for w in weights]
        self._copied = torch.cuda.Event()

    def fetch(self, tensors: Tensors) -> tuple[Tensors, Callable[[], None]]:
        """From the GPU, once what it still computes is there; and what waits until it has come."""
        for host, device in zip(self._host, tensors, strict=True):
            host.copy_(device, non_blocking=True)
        self._copied.record()
        return self._host, self._copied.synchronize

    def room(self) -> Tensors:
        """For what is to come: what came before has been brought."""
        self._copied.synchronize()
        return self._host

    def bring(self, into: Tensors) -> None:
        """To the GPU, in the order of its stream: nobody waits here."""
        for device, host in zip(into, self._host, strict=True):
            device.copy_(host, non_blocking=True)
        self._copied.record()


class PendingRequest(Pending[Any]):
    """A push, a pull or a sum under way, to all shards."""

    def __init__(
        self,
        port: ProcessPort,
        name: tuple[str, str],  # what it is, and which one of its kind
        ways: list[ShardChannel],
        errands: list[Request],
        nbytes: int,
        land: Callable[[], Any],
        sends: int = 0,
    ) -> None:
        self._port = port
        self._name = name
        self._under_way = list(zip(ways, errands, strict=True))
        self._land = land
        # Where a slower link is emulated, it is busy from here on.
        self._nbytes = nbytes
        self._shaper = None if port.ledger.is_paused else port.shaper
        self._delivered_at = self._shaper.deliver(nbytes) if self._shaper else 0.0
        self._error: RankLost | None = None
        self._landed = False
        self._value: Any = None
        port.ledger.operation_started()
        port.ledger.sent(sends)

    def done(self) -> bool:
        return self._landed

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value

    def wait(self) -> None:
        began = time.monotonic()
        for way, errand in self._under_way:
            if self._error is None:
                self._error = way.finish(errand, began + self._port.timeout_s)
        self._port.ledger.operation_ended()
        if self._error is None:
            if self._shaper is not None:
                time.sleep(max(0.0, self._delivered_at - time.monotonic()))
                self._shaper.delivered(self._nbytes)
            self._value = self._land()
            # It may have been over long before it was waited for: the link's threads know.
            sent_s = min(errand.began_s for _, errand in self._under_way)
            there_s = max(errand.ended_s for _, errand in self._under_way)
            self._port.ledger.record_span(*self._name, sent_s, max(there_s, self._delivered_at))
        self._landed = True
        self._port.ledger.waited(time.monotonic() - began)
