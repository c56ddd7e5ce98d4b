"""All-reduce of several flat tensors to their mean, through a codec or as they are.

`MeanAllReduce` is the exchange that strategies share: start each tensor when it is ready, exchange (the
second phase of codecs that have two), finish. A single worker sends nothing, so it uses no codec.

`GradientAllReduce` is the same for the gradients of a replica, block by block as backward completes them. A
block's marks tell which parameters got a gradient on any worker. Without a codec they travel with the block's
gradient. A codec sees the gradient alone, and the marks, which must be exact, follow the last block in one
tensor: one number per parameter of all blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from offbeat.codecs.base import Codec, Stream
from offbeat.codecs.error_feedback import ErrorFeedback, Residual
from offbeat.codecs.two_phase import TwoPhaseCodec
from offbeat.core.blocks import Block
from offbeat.core.pending import Arrived, Pending
from offbeat.core.port import Lane, Op, Port, Reducer
from offbeat.core.replica import Replica
from offbeat.errors import SettingError

_UNSAVED: dict[str, Any] = {"saved": False}


@dataclass
class MeanAllReduce:
    """The mean over all workers of several flat tensors, on one lane; a part of a strategy's state.

    Finish before a checkpoint: streams are saved, tensors in flight are not.
    """

    streams: list[Stream] = field(default_factory=list)  # with a codec, one for each tensor
    codec: Codec | None = field(default=None, metadata=_UNSAVED)
    lane: Lane = field(default=Lane.FRONT, metadata=_UNSAVED)
    tensors: list[Tensor] = field(default_factory=list, metadata=_UNSAVED)  # in flight
    in_use: list[Stream] = field(default_factory=list, metadata=_UNSAVED)  # the streams of these tensors
    pending: list[Pending[Any]] = field(default_factory=list, metadata=_UNSAVED)
    exchanged: bool = field(default=False, metadata=_UNSAVED)

    @classmethod
    def of_blocks(
        cls,
        blocks: Sequence[Block],
        codec: Codec | None,
        lane: Lane = Lane.FRONT,
        single_phase: bool = False,
    ) -> MeanAllReduce:
        """Create the all-reduce of tensors that are laid out as the blocks' weights."""
        streams = [codec.stream(b.weight, b.matrices(), lane, single_phase) for b in blocks] if codec else []
        return cls(streams, codec, lane)

    @classmethod
    def of_tensors(cls, like: Sequence[Tensor], codec: Codec | None, lane: Lane) -> MeanAllReduce:
        """Create the all-reduce of tensors like these."""
        return cls([codec.stream(tensor, lane=lane) for tensor in like] if codec else [], codec, lane)

    def uses_codec(self, port: Port) -> bool:
        """Return whether packets are sent: there is a codec, and more than one worker."""
        return self.codec is not None and port.world > 1

    def start(self, tensor: Tensor, port: Port, number: int, reducer: Reducer | None = None) -> None:
        """Send `tensor`, by stream `number` where there is a codec. The tensor becomes the mean, in place.

        Without a codec `reducer` computes the mean; None: the port.
        """
        if self.codec is not None and port.world > 1:
            self.tensors.append(tensor)
            self.in_use.append(self.streams[number])
            self.pending.append(self.codec.start(self.streams[number], tensor, port))
        else:
            empty = not tensor.numel()
            self.pending.append(
                Arrived(tensor) if empty else (reducer or port).all_reduce(tensor, lane=self.lane)
            )

    async def exchange(self, port: Port) -> None:
        """Start the second phase, for codecs that have two. `finish` calls it if the caller has not."""
        if self.codec is None or not self.tensors or self.exchanged:
            return
        started = zip(self.in_use, self.tensors, self.pending, strict=True)
        self.pending = [await self.codec.exchange(s, tensor, port, sent) for s, tensor, sent in started]
        self.exchanged = True

    async def finish(self, port: Port) -> list[Tensor]:
        """Wait for all started exchanges, and return the means, in the order of `start`."""
        if self.codec is None or not self.tensors:
            means = [await pending for pending in self.pending]
        else:
            await self.exchange(port)
            means = self.tensors
            for stream, tensor, sent in zip(self.in_use, self.tensors, self.pending, strict=True):
                await self.codec.finish(stream, tensor, port, sent)
        self.tensors, self.in_use, self.pending, self.exchanged = [], [], [], False
        return means

    def forget_errors(self) -> None:
        """Clear the stored errors of a state that was copied: they are another worker's to send."""
        for stream in self.streams:
            if isinstance(stream.memory, Residual):
                stream.memory.error.zero_()


@dataclass
class GradientAllReduce:
    """The mean of a replica's gradients over all workers; a part of a strategy's state."""

    reduction: MeanAllReduce
    blocks: list[Block] = field(metadata=_UNSAVED)
    marks: Tensor = field(metadata=_UNSAVED)  # with a codec: the marks of all blocks
    marked: list[Pending[Tensor]] = field(default_factory=list, metadata=_UNSAVED)  # `marks`, in flight

    @classmethod
    def of(cls, replica: Replica, codec: Codec | None) -> GradientAllReduce:
        """Create the all-reduce of the replica's gradients; without a codec they are sent as they are."""
        count = sum(len(block.params) for block in replica.blocks) if codec else 0
        marks = torch.empty(count, device=replica.blocks[0].weight.device)
        return cls(MeanAllReduce.of_blocks(replica.blocks, codec), replica.blocks, marks)

    def start(self, block: Block, port: Port) -> None:
        """Send a block's complete gradient. Blocks must be started in the order of their indices."""
        if not self.reduction.uses_codec(port):
            self.reduction.start(block.marked, port, block.index)
            return
        self.reduction.start(block.grad, port, block.index)
        if block is self.blocks[-1]:
            for marks, each in zip(self._marks_by_block(), self.blocks, strict=True):
                marks.copy_(each.marks)
            self.marked = [port.all_reduce(self.marks, Op.MAX)]

    async def finish(self, port: Port) -> None:
        """Wait for the mean gradients, and give them to the parameters."""
        await self.reduction.finish(port)
        for pending in self.marked:
            await pending
            for marks, block in zip(self._marks_by_block(), self.blocks, strict=True):
                block.clear_gaps(block.grad)  # or the codec's values there would be sent next time
                block.marks.copy_(marks)
        self.marked = []
        for block in self.blocks:
            block.hand_out()

    def _marks_by_block(self) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = self.marks.split([len(block.params) for block in self.blocks])
        return parts


def check_elastic_codec(codec: Codec | None, minimum: int, single_phase: bool = False) -> None:
    """Raise an error if the codec's exchange cannot be redone when a worker is lost, with the reason."""
    inner = codec.codec if isinstance(codec, ErrorFeedback) else codec
    if isinstance(inner, TwoPhaseCodec) and not single_phase:
        raise SettingError(
            f"elastic=True with codec={codec}: packets travel by way of owners of slices, and a lost owner's "
            "slice cannot be sent again; use a codec of one phase, such as TopK"
        )
    if codec is not None and minimum < 2:
        raise SettingError(
            f"elastic=True with codec={codec}: a single worker sends no packets, so minimum must be 2 or more"
        )
