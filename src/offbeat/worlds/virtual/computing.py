"""Computing beside the steps: codecs that encode and decode, and shards that apply pushes. [ours]

    an operation on packets     starts after encode_s · (bytes that the worker has encoded), longer or shorter
                                by a factor with the median 1 and a logarithm with this `deviation`
    its result                  takes decode_s · (bytes that the worker decodes), once it is awaited
    a push at a shard           waits for the shard's earlier messages, and then takes
                                apply_s · (bytes of the update) + decode_s · (bytes of its packets)
    a worker beside a shard     computes for longer: by `beside` · (what the shard takes meanwhile)
    a worker that exchanges     computes for longer: by exchange_s · (bytes that it pushes and pulls), and by
                                exchange_s · (bytes that shards beside it exchange while it computes)

A worker encodes and decodes in its own loop, so its steps take that much longer. Every operation of a
strategy with a codec counts as one on packets, but for control traffic and broadcasts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

from torch import Tensor

from offbeat.core.ledger import CONTROL_BYTES
from offbeat.core.pending import Pending
from offbeat.core.port import Signature
from offbeat.worlds.virtual.costs import CodecCost
from offbeat.worlds.virtual.random_numbers import lognormal
from offbeat.worlds.virtual.scheduler import Clock, Event

T = TypeVar("T")
ENCODING = 1 << 40  # the seed of these numbers, which no run has


class Core:
    """The processor of one worker, which has other work than steps."""

    def __init__(self, clock: Clock, rank: int) -> None:
        self._clock = clock
        self._rank = rank
        self._encoded = 0  # times that it has encoded
        self._busy_until_s = 0.0
        self.computing = False
        self._owed_s = 0.0  # by the worker's computing, for its own other work
        self._taken_s = 0.0  # from the worker's computing by others, and not yet made up for

    @property
    def delay_s(self) -> float:
        """Seconds until the work that the worker has begun is done."""
        return max(0.0, self._busy_until_s - self._clock.now)

    def work(self, seconds: float) -> None:
        """Begin other work of the worker, after what it has begun before."""
        if seconds:
            self._busy_until_s = self._clock.now + self.delay_s + seconds

    def encode(self, cost: CodecCost, nbytes: int) -> None:
        """Begin to encode packets of so many bytes."""
        seconds = cost.encode_s * nbytes
        if cost.deviation and seconds:
            self._encoded += 1
            seconds *= lognormal(cost.deviation, ENCODING, self._rank, self._encoded)
        self.work(seconds)

    def take(self, seconds: float) -> None:
        """Take seconds from the worker, if it computes."""
        if self.computing:
            self._taken_s += seconds

    def owe(self, seconds: float) -> None:
        """Lengthen what the worker computes now or next."""
        self._owed_s += seconds

    async def rest(self) -> None:
        """Wait until the worker's other work is done."""
        if self.delay_s:
            await self._clock.sleep(self._busy_until_s)

    async def compute(self, until_s: float) -> float:
        """Compute until then, and for as long as was taken meanwhile; return the seconds that were taken.

        Others take half of the time at most, as an operating system shares a core: a worker beside a shard
        that serves very many goes on. What is beyond that is not charged.
        """
        late_s, span_s = 0.0, until_s - self._clock.now
        self.computing = True
        await self._clock.sleep(until_s)
        while self._taken_s or self._owed_s:
            span_s = self._owed_s + min(self._taken_s, span_s / 2)
            self._owed_s = self._taken_s = 0.0
            await self._clock.sleep(self._clock.now + span_s)
            late_s += span_s
        self.computing = False
        return late_s


def packet_bytes(signature: Signature, rank: int) -> tuple[int, int]:
    """Return the bytes that a worker encodes before an operation on packets, and decodes after it."""
    name, _, sizes = signature
    if name == "broadcast" or sum(sizes) < CONTROL_BYTES:
        return 0, 0
    if name == "all_gather":
        return sizes[rank], sum(sizes)
    if name == "reduce_scatter":
        return sum(sizes), sizes[rank] * len(sizes)
    return sum(sizes), sum(
        sizes
    )  # in an all-to-all, packets for a worker are about as large as those from it


class Decoding(Pending[T]):
    """The result of an operation on packets: whoever awaits it decodes it."""

    __slots__ = ("_core", "_decode_s", "_event")

    def __init__(self, event: Event[T], core: Core, decode_s: float) -> None:
        self._event = event
        self._core = core
        self._decode_s = decode_s

    def done(self) -> bool:
        return self._event.done()

    def result(self) -> T:
        self._core.work(self._decode_s)
        self._decode_s = 0.0  # decoded once
        return self._event.result()

    def wait(self) -> None:
        self._event.wait()

    def fill_once(self, into: Tensor, fill: Callable[[], None]) -> None:
        self._event.fill_once(into, fill)

    def __await__(self) -> Generator[Pending[Any], None, T]:
        yield from self._event.__await__()
        value = self.result()
        yield from self._core.rest().__await__()
        return value
