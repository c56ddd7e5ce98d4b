"""Two-phase exchange: the mean of packets that cannot be added up, by way of owners.

    a tensor is cut into N slices, of which each worker owns one
    phase 1   an all-to-all of packets: all workers' packets of a slice go to its owner, which decodes and
              averages them (a reduce-scatter)
    phase 2   an all-gather: each owner encodes the mean of its slice and sends that packet to all workers

So 2(N − 1)/N packets leave a NIC, as on a ring, instead of the N − 1 of an all-gather. The mean is encoded
once more; under error feedback its owner stores the error, and adds it to the next mean. Two workers use an
all-gather, which sends as much and encodes once. So does a stream of a single phase.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from offbeat.codecs.base import Codec, Stream
from offbeat.codecs.error_feedback import ErrorFeedback, Residual
from offbeat.core.blocks import Matrix
from offbeat.core.partition import even_slices
from offbeat.core.pending import Pending
from offbeat.core.port import Lane, Port


@dataclass
class TwoPhaseStream(Stream):
    """The traffic of one tensor by way of owners. `packets` are those of the slices, in both phases."""

    # All of the slice that this worker owns: the codec's memory of the mean, the mean, packets by sender.
    owned: Any = None
    mean: Tensor = field(default_factory=lambda: torch.empty(0), metadata={"saved": False})
    received: list[Tensor] = field(default_factory=list, metadata={"saved": False})


@dataclass(frozen=True)
class TwoPhaseCodec(Codec):
    """A codec with packets so large that sending every packet to every worker would cost too much."""

    @property
    @abstractmethod
    def grain(self) -> int:
        """The number of entries that belong together: no slice ends between them."""

    def stream(
        self,
        like: Tensor,
        matrices: Sequence[Matrix] = (),
        lane: Lane = Lane.FRONT,
        single_phase: bool = False,
    ) -> Stream:
        if single_phase:
            return super().stream(like, matrices, lane)
        return TwoPhaseStream(self.init(like), lane, owned=Residual(like.new_empty(0), self.init(like)))

    def start(self, stream: Stream, tensor: Tensor, port: Port, remainder: bool = False) -> Pending[Any]:
        if not isinstance(stream, TwoPhaseStream) or port.world <= 2:
            return super().start(stream, tensor, port, remainder)
        slices = even_slices(tensor, port.world, self.grain)
        self._allocate(stream, slices, port.rank)
        for part, packet in zip(slices, stream.packets, strict=True):
            (self.encode_residual if remainder else self.encode)(stream.memory, part, packet)
        return port.all_to_all(stream.packets, stream.received, stream.lane)

    async def exchange(
        self, stream: Stream, tensor: Tensor, port: Port, sent: Pending[Any], remainder: bool = False
    ) -> Pending[Any]:
        if not isinstance(stream, TwoPhaseStream) or port.world <= 2:
            return sent
        await sent
        mean = stream.mean.zero_()
        for packet in stream.received:
            self.accumulate(packet, mean, 1 / port.world)
        own = stream.packets[port.rank]
        if remainder:
            ErrorFeedback(self).encode(stream.owned, mean, own)
        else:
            self.encode(stream.owned.inner, mean, own)
        return port.all_gather(stream.packets, stream.lane)

    async def finish(self, stream: Stream, into: Tensor, port: Port, sent: Pending[Any]) -> None:
        if not isinstance(stream, TwoPhaseStream) or port.world <= 2:
            await super().finish(stream, into, port, sent)
            return
        await sent
        sent.fill_once(into, lambda: self._decode_slices(stream.packets, into))

    def _decode_slices(self, packets: list[Tensor], into: Tensor) -> None:
        for part, packet in zip(even_slices(into, len(packets), self.grain), packets, strict=True):
            self.decode(packet, part)

    def _allocate(self, stream: TwoPhaseStream, slices: list[Tensor], rank: int) -> None:
        own = slices[rank]
        if stream.owned.error.numel() != own.numel():
            stream.owned.error = torch.zeros_like(own)
        if stream.packets:
            return
        stream.mean = torch.empty_like(own)
        stream.packets = [self._packet(part) for part in slices]
        stream.received = [self._packet(own) for _ in slices]
        stream.received[rank] = stream.packets[rank]  # the packet for this worker itself is not sent

    def _packet(self, part: Tensor) -> Tensor:
        nbytes = self.nbytes(part.numel(), part.dtype)
        return torch.empty(nbytes, dtype=torch.uint8, device=part.device)
