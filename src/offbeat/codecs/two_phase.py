"""Relay: the mean of packets that do not add up, by way of owners.

    a tensor is cut into N stretches, of which each worker owns one
    there   everybody's packets of a stretch go to its owner, who decodes and averages them
    back    a packet of that mean goes from there to everybody

So 2(N − 1)/N packets leave a NIC, as on a ring, and not the N − 1 that gathering takes. The mean is encoded
once more; under error feedback its owner keeps what that loses, and adds it to the next mean. Two workers
gather: that is no more, and encoded once. So does who sends one way only.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from offbeat.codecs.base import Codec, Matrix, Stream
from offbeat.codecs.error_feedback import ErrorFeedback, Residual
from offbeat.core.pending import Pending
from offbeat.core.port import Lane, Port


@dataclass
class TwoPhaseStream(Stream):
    """A tensor's traffic by way of owners. `packets` are those of the stretches, there and then back."""

    back: Any = None  # what is remembered of the mean that this worker owns
    mean: Tensor = field(default_factory=lambda: torch.empty(0), metadata={"saved": False})
    arrived: list[Tensor] = field(default_factory=list, metadata={"saved": False})  # everybody's, of that


@dataclass(frozen=True)
class TwoPhaseCodec(Codec):
    """A codec whose packets are not much smaller than the tensor: to send all of them to all is too much."""

    @property
    @abstractmethod
    def grain(self) -> int:
        """Entries that belong together: no stretch ends between them."""

    def stream(
        self, like: Tensor, matrices: Sequence[Matrix] = (), lane: Lane = Lane.FRONT, one_way: bool = False
    ) -> Stream:
        if one_way:
            return super().stream(like, matrices, lane)
        return TwoPhaseStream(self.init(like), lane, back=Residual(like.new_empty(0), self.init(like)))

    def start(self, wire: Stream, tensor: Tensor, port: Port, remainder: bool = False) -> Pending[Any]:
        if not isinstance(wire, TwoPhaseStream) or port.world <= 2:
            return super().start(wire, tensor, port, remainder)
        stretches = self._stretches(tensor, port.world)
        self._make_room(wire, stretches, port.rank)
        for stretch, packet in zip(stretches, wire.packets, strict=True):
            (self.encode_residual if remainder else self.encode)(wire.memory, stretch, packet)
        return port.all_to_all(wire.packets, wire.arrived, wire.lane)

    async def exchange(
        self, wire: Stream, tensor: Tensor, port: Port, sent: Pending[Any], remainder: bool = False
    ) -> Pending[Any]:
        if not isinstance(wire, TwoPhaseStream) or port.world <= 2:
            return sent
        await sent
        mean = wire.mean.zero_()
        for packet in wire.arrived:
            self.accumulate(packet, mean, 1 / port.world)
        own = wire.packets[port.rank]
        if remainder:
            ErrorFeedback(self).encode(wire.back, mean, own)
        else:
            self.encode(wire.back.inner, mean, own)
        return port.all_gather(wire.packets, wire.lane)

    async def finish(self, wire: Stream, into: Tensor, port: Port, sent: Pending[Any]) -> None:
        if not isinstance(wire, TwoPhaseStream) or port.world <= 2:
            await super().finish(wire, into, port, sent)
            return
        await sent
        for stretch, packet in zip(self._stretches(into, port.world), wire.packets, strict=True):
            self.decode(packet, stretch)

    def _stretches(self, tensor: Tensor, world: int) -> list[Tensor]:
        """As even as they can be; where there is little, some have nothing."""
        grains = -(-tensor.numel() // self.grain)
        edges = [min(tensor.numel(), self.grain * (grains * k // world)) for k in range(world + 1)]
        return [tensor[low:high] for low, high in pairwise(edges)]

    def _make_room(self, wire: TwoPhaseStream, stretches: list[Tensor], rank: int) -> None:
        own = stretches[rank]
        if wire.back.error.numel() != own.numel():
            wire.back.error = torch.zeros_like(own)
        if wire.packets:
            return
        wire.mean = torch.empty_like(own)
        wire.packets = [self._packet(stretch) for stretch in stretches]
        wire.arrived = [self._packet(own) for _ in stretches]
        wire.arrived[rank] = wire.packets[rank]  # which goes nowhere

    def _packet(self, stretch: Tensor) -> Tensor:
        nbytes = self.nbytes(stretch.numel(), stretch.dtype)
        return torch.empty(nbytes, dtype=torch.uint8, device=stretch.device)
