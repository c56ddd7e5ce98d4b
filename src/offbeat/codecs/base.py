"""Codec: what goes on the wire instead of a tensor.

A codec is a frozen dataclass of settings. What it remembers of a tensor from one time to the next (what
has not been sent yet, a count that seeds its draws) is made by `init`, handed in at each call, and saved
in checkpoints.

A *packet* is flat memory of bytes. Its size follows from the codec's settings and the tensor's size
alone, so both ends know it beforehand. Packets that can be added up as they are travel by a reduction. Of
others every worker gets everybody's, and adds up what they decode to in the order of ranks, the same bits
everywhere; or, where that is too much, they go by way of owners (`relay.py`).

What is not finite stays so: a packet of a tensor with an infinity or a NaN in it decodes to one that has
some.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from offbeat.core.pending import Pending
from offbeat.core.port import Lane, Port
from offbeat.errors import SettingError


class Matrix(NamedTuple):
    """Where in a flat tensor a parameter lies, as a matrix of its outermost dimension by all others."""

    offset: int
    rows: int
    cols: int


@dataclass
class Stream:
    """One tensor's traffic: what the codec remembers of it, and memory of the packets of all workers.

    What is sent lands before the next is sent, and before anything is saved: no checkpoint holds packets.
    """

    memory: Any
    lane: Lane = field(default=Lane.FRONT, metadata={"saved": False})
    packets: list[Tensor] = field(default_factory=list, metadata={"saved": False})

    def room(self, count: int, nbytes: int, device: torch.device) -> list[Tensor]:
        if len(self.packets) != count or self.packets[0].numel() != nbytes:
            self.packets = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(count)]
        return self.packets


@dataclass(frozen=True)
class Codec(ABC):
    """How a tensor becomes a packet, and what a packet stands for."""

    name: ClassVar[str]
    splittable: ClassVar[bool] = True
    """Whether any stretch of a tensor can be encoded by itself, as the shards of a server need."""

    summable: ClassVar[bool] = False
    """Whether packets can be added up as they are: then `summands` says which part of them."""

    @property
    def contractive(self) -> bool:
        """Whether what is lost is never more than what was there, so that it can be kept and sent later."""
        return True

    @property
    def wire_ratio(self) -> float:
        """About which part of a large tensor's bytes a packet has."""
        return self.nbytes(1 << 20, torch.float32) / (4 << 20)

    def init(self, like: Tensor, matrices: Sequence[Matrix] = ()) -> Any:
        """What is remembered of a tensor like this one, before it is first encoded."""
        return None

    def memory_at(self, count: int) -> Any:
        """What is remembered by one who counts how often it encodes, and keeps nothing else."""
        return None

    @abstractmethod
    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """How large a packet is."""

    @abstractmethod
    def encode(self, memory: Any, tensor: Tensor, packet: Tensor) -> None:
        """Fill `packet`. The tensor stays as it is; error feedback alone leaves in it what it keeps."""

    def encode_residual(self, memory: Any, tensor: Tensor, packet: Tensor) -> None:
        """Fill `packet`, and leave in the tensor what does not travel with it."""
        self.encode(memory, tensor, packet)
        self.accumulate(packet, tensor, -1.0)

    @abstractmethod
    def accumulate(self, packet: Tensor, into: Tensor, factor: float = 1.0) -> None:
        """Add what the packet stands for, times `factor`."""

    def decode(self, packet: Tensor, into: Tensor) -> None:
        self.accumulate(packet, into.zero_())

    def summands(self, packet: Tensor, dtype: torch.dtype) -> Tensor:
        """The part of a packet which, added up over the workers, stands for the sum: only with `summable`."""
        raise NotImplementedError(f"packets of {self} cannot be added up: it has no `summable`")

    # --- the mean over all workers: sent in backward, turned round where it takes two ways, landed in the end

    def stream(
        self, like: Tensor, matrices: Sequence[Matrix] = (), lane: Lane = Lane.FRONT, one_way: bool = False
    ) -> Stream:
        """`one_way`: what is sent is not turned before it is to land, so that nothing may be left to travel
        then, if the codec can help it."""
        return Stream(self.init(like, matrices), lane)

    def start(self, wire: Stream, tensor: Tensor, port: Port, remainder: bool = False) -> Pending[Any]:
        """Start. With `remainder`, what does not travel is left in the tensor: here, or by `turn`."""
        nbytes = self.nbytes(tensor.numel(), tensor.dtype)
        packets = wire.room(1 if self.summable else port.world, nbytes, tensor.device)
        own = packets[0 if self.summable else port.rank]
        (self.encode_residual if remainder else self.encode)(wire.memory, tensor, own)
        if self.summable:
            return port.all_reduce(self.summands(own, tensor.dtype), lane=wire.lane)
        return port.all_gather(packets, wire.lane)

    async def exchange(
        self, wire: Stream, tensor: Tensor, port: Port, sent: Pending[Any], remainder: bool = False
    ) -> Pending[Any]:
        """The second way, for codecs whose packets have one."""
        return sent

    async def finish(self, wire: Stream, into: Tensor, port: Port, sent: Pending[Any]) -> None:
        """Put the mean in place."""
        await sent
        if self.summable:
            self.decode(wire.packets[0], into)
            return
        into.zero_()
        for packet in wire.packets:
            self.accumulate(packet, into, 1 / port.world)

    @classmethod
    def from_text(cls, text: str) -> Codec:
        """The inverse of `str`."""
        from offbeat.codecs import codec  # which knows all of them

        return codec(text)

    def __str__(self) -> str:
        """As it is written on a command line."""
        settings = {f.name: getattr(self, f.name) for f in fields(self)}
        told = [
            _text(settings[f.name]) if number == 0 else f"{f.name}={_text(settings[f.name])}"
            for number, f in enumerate(fields(self))
            if number == 0 or settings[f.name] != f.default
        ]
        return f"{self.name}({', '.join(told)})" if told else self.name


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Sparse(Codec):
    """A codec that sends a part of the entries."""

    ratio: float

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def count(self, numel: int) -> int:
        """How many of `numel` entries are sent: at least one."""
        return min(numel, max(1, round(self.ratio * numel)))


def check_ratio(ratio: float) -> None:
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise SettingError(f"ratio={ratio!r}: the part of the entries that is sent, above 0 and at most 1")


async def exchange_all(
    codec: Codec, wires: Sequence[Stream], tensors: Sequence[Tensor], port: Port, sent: Sequence[Pending[Any]]
) -> list[Pending[Any]]:
    """Have what was sent of several tensors begin its second way, where it has one."""
    return [await codec.exchange(w, t, port, s) for w, t, s in zip(wires, tensors, sent, strict=True)]


async def finish_all(
    codec: Codec, wires: Sequence[Stream], into: Sequence[Tensor], port: Port, turned: Sequence[Pending[Any]]
) -> None:
    """Put the means of several tensors in place, all of which have turned."""
    for wire, tensor, pending in zip(wires, into, turned, strict=True):
        await codec.finish(wire, tensor, port, pending)


async def exchange_and_finish(
    codec: Codec, wires: Sequence[Stream], tensors: Sequence[Tensor], port: Port, sent: Sequence[Pending[Any]]
) -> None:
    await finish_all(codec, wires, tensors, port, await exchange_all(codec, wires, tensors, port, sent))
