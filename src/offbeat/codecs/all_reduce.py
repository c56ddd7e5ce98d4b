"""Coded: gradients that travel by a codec, block by block, as backward completes them.

A codec sees a block's gradient alone. The marks, which tell what got a gradient anywhere and must be
exact, follow the last block: one number a parameter, of all blocks together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from offbeat.codecs import Codec, Stream, exchange_and_finish
from offbeat.core.pending import Pending
from offbeat.core.port import Op, Port
from offbeat.core.replica import Replica


@dataclass
class GradientAllReduce:
    """A part of a strategy's state."""

    wires: list[Stream]  # by block
    marks: Tensor = field(metadata={"saved": False})
    flying: list[Pending[Any]] = field(default_factory=list)

    @classmethod
    def of(cls, replica: Replica, codec: Codec) -> GradientAllReduce:
        wires = [codec.stream(block.weight, block.matrices()) for block in replica.blocks]
        count = sum(len(block.params) for block in replica.blocks)
        return cls(wires, torch.empty(count, device=replica.blocks[0].weight.device))

    def start(self, codec: Codec, replica: Replica, port: Port) -> None:
        """The next block's gradient is complete."""
        number = len(self.flying)
        self.flying.append(codec.start(self.wires[number], replica.blocks[number].grad, port))
        if len(self.flying) == len(replica.blocks):
            for part, block in zip(self._marks(replica), replica.blocks, strict=True):
                part.copy_(block.marks)
            self.flying.append(port.all_reduce(self.marks, Op.MAX))

    async def finish(self, codec: Codec, replica: Replica, port: Port) -> None:
        """Put the mean gradients in place, and hand them out."""
        *sent, marked = self.flying
        self.flying = []
        await exchange_and_finish(codec, self.wires, [block.grad for block in replica.blocks], port, sent)
        await marked
        for part, block in zip(self._marks(replica), replica.blocks, strict=True):
            block.clear_gaps(block.grad)  # or what a codec puts there would travel next time
            block.marks.copy_(part)
            block.hand_out()

    def _marks(self, replica: Replica) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = self.marks.split([len(block.params) for block in replica.blocks])
        return parts
