"""Codec: what travels instead of a tensor.

A codec is a frozen dataclass of settings. Its *memory* of a tensor, which lasts from one encoding to the next
(the error that has not been sent yet, a count that seeds random draws), is made by `init`, handed in at each
call, and saved in checkpoints.

A *packet* is a flat tensor of bytes. Its size follows from the codec's settings and the tensor's size alone,
so sender and receiver both know it beforehand. How packets become the mean over all workers:

    summable packets    by an all-reduce of the packets themselves
    others              by an all-gather: each worker adds up the decoded packets in the order of ranks, so
                        the result has the same bits everywhere
    large others        in two phases, by way of owners (see `two_phase.py`)

Infinities and NaNs survive: the packet of a tensor that is not finite decodes to one that is not finite.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from offbeat.core.blocks import Matrix
from offbeat.core.fields import Number
from offbeat.core.pending import Pending
from offbeat.core.port import Lane, Port
from offbeat.core.settings import Settings, call_text


@dataclass
class Stream:
    """The traffic of one tensor: the codec's memory of it, and buffers for the packets of all workers.

    An exchange finishes before the next one starts, and before anything is saved: no checkpoint holds
    packets.
    """

    memory: Any
    lane: Lane = field(default=Lane.FRONT, metadata={"saved": False})
    packets: list[Tensor] = field(default_factory=list, metadata={"saved": False})

    def packet_buffers(self, count: int, nbytes: int, device: torch.device) -> list[Tensor]:
        """Return `count` packets of `nbytes`, allocated at the first call."""
        if len(self.packets) != count or self.packets[0].numel() != nbytes:
            self.packets = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(count)]
        return self.packets


@dataclass(frozen=True)
class Codec(Settings, ABC):
    """Encoder and decoder: it turns a tensor into a packet, and a packet into an approximate tensor."""

    name: ClassVar[str]
    summary: ClassVar[str]

    splittable: ClassVar[bool] = True
    """True if any slice of a tensor can be encoded by itself, as the shards of a server need."""

    cuts_anywhere: ClassVar[bool] = False
    """True if packets of a finer cut are as small in sum, and the bound on the error is the same."""

    summable: ClassVar[bool] = False
    """True if packets can be added up as they are: then `summands` returns the part of a packet to add."""

    @property
    def contractive(self) -> bool:
        """True if the error is never larger than the tensor, so that it can be stored and sent later."""
        return True

    @property
    def wire_ratio(self) -> float:
        """Approximate size of a packet, as a fraction of the size of a large tensor."""
        return self.nbytes(1 << 20, torch.float32) / (4 << 20)

    def init(self, like: Tensor, matrices: Sequence[Matrix] = ()) -> Any:
        """Create the memory of a tensor like this one, before its first encoding."""
        return None

    def memory_at(self, count: int) -> Any:
        """Return the memory of a caller that only counts its encodings, for encoding number `count`."""
        return None

    @abstractmethod
    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the size of the packet of `numel` entries."""

    @abstractmethod
    def encode(self, memory: Any, tensor: Tensor, packet: Tensor) -> None:
        """Encode the tensor into `packet`. The tensor is unchanged, except that error feedback changes it."""

    def encode_residual(self, memory: Any, tensor: Tensor, packet: Tensor) -> None:
        """Encode the tensor into `packet`, and leave the residual in the tensor: what the packet lacks."""
        self.encode(memory, tensor, packet)
        self.accumulate(packet, tensor, -1.0)

    @abstractmethod
    def accumulate(self, packet: Tensor, into: Tensor, factor: float = 1.0) -> None:
        """Add the decoded packet, times `factor`, to `into`."""

    def decode(self, packet: Tensor, into: Tensor) -> None:
        """Overwrite `into` with the decoded packet."""
        self.accumulate(packet, into.zero_())

    def summands(self, packet: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the part of a packet that workers add up to encode the sum; only if `summable`."""
        raise NotImplementedError(f"packets of {self} cannot be added up: it is not `summable`")

    # --- the mean over all workers: start in backward, exchange (the second phase, if any), finish

    def stream(
        self,
        like: Tensor,
        matrices: Sequence[Matrix] = (),
        lane: Lane = Lane.FRONT,
        single_phase: bool = False,
    ) -> Stream:
        """Create the stream of a tensor like this one.

        With `single_phase`, the caller leaves no time between `exchange` and `finish`. A second phase could
        not overlap any computation, so the codec uses one phase if it can.
        """
        return Stream(self.init(like, matrices), lane)

    def start(self, stream: Stream, tensor: Tensor, port: Port, remainder: bool = False) -> Pending[Any]:
        """Encode and send `tensor`. With `remainder`, this or `exchange` leaves the residual in it."""
        nbytes = self.nbytes(tensor.numel(), tensor.dtype)
        packets = stream.packet_buffers(1 if self.summable else port.world, nbytes, tensor.device)
        own = packets[0 if self.summable else port.rank]
        (self.encode_residual if remainder else self.encode)(stream.memory, tensor, own)
        if self.summable:
            return port.all_reduce(self.summands(own, tensor.dtype), lane=stream.lane)
        return port.all_gather(packets, stream.lane)

    async def exchange(
        self, stream: Stream, tensor: Tensor, port: Port, sent: Pending[Any], remainder: bool = False
    ) -> Pending[Any]:
        """Wait for the first phase and start the second one, for codecs that have two."""
        return sent

    async def finish(self, stream: Stream, into: Tensor, port: Port, sent: Pending[Any]) -> None:
        """Wait for the last phase, and write the mean into `into`."""
        await sent
        if self.summable:
            self.decode(stream.packets[0], into)
            return
        sent.fill_once(into, lambda: self._average(stream.packets, into))

    def _average(self, packets: list[Tensor], into: Tensor) -> None:
        into.zero_()
        for packet in packets:
            self.accumulate(packet, into, 1 / len(packets))

    @classmethod
    def from_text(cls, text: str) -> Codec:
        """Build the codec that a text names; the inverse of `str`."""
        from offbeat.codecs import codec  # here, since that package imports this module

        return codec(text)

    def __str__(self) -> str:
        """Write the codec as a command line takes it."""
        return call_text(self)


Ratio = Annotated[
    float,
    Number("fraction of the entries that is sent", noun="a fraction of the entries,", above=0, at_most=1),
]


@dataclass(frozen=True)
class Sparse(Codec):
    """A codec that sends a part of the entries."""

    cuts_anywhere = True  # the same fraction of every slice

    ratio: Ratio

    def count(self, numel: int) -> int:
        """Return how many of `numel` entries are sent: at least one."""
        return min(numel, max(1, round(self.ratio * numel)))
