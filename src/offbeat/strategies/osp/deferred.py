"""Deferred blocks: their gradients travel behind the next step's computation (ICS).

Meanwhile the replica holds a prediction of their weights. The global weights are saved here, until the
averaged gradients have arrived and the user's own optimizer steps them, at the learning rates of the step
that sent them. Blocks lie one after the other in one flat tensor per dtype and device, so that they travel
in one operation.

With a codec each block travels by itself, since a codec's memory belongs to a block, and the marks, which
must be exact, travel in one tensor. When they have arrived, they are copied to where they would be without a
codec.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from offbeat.codecs.all_reduce import MeanAllReduce
from offbeat.core.blocks import Block
from offbeat.core.pending import Pending
from offbeat.core.port import Lane, Port, Reducer
from offbeat.core.replica import Replica
from offbeat.strategies.osp.split import marked_bytes

Step = Callable[[list[Block], list[Tensor], list[float], set[nn.Parameter]], None]


@dataclass
class DeferredBlocks:
    """The deferred blocks of one step; a part of OSP's state. Its memory is allocated once."""

    reduction: MeanAllReduce = field(default_factory=lambda: MeanAllReduce(lane=Lane.BACK))
    marks: list[Pending[Tensor]] = field(default_factory=list, metadata={"saved": False})  # with a codec
    blocks: list[int] = field(default_factory=list)
    absent: list[list[int]] = field(default_factory=list)  # by block: which parameters got no gradient here
    rates: list[float] = field(default_factory=list)
    arrived: list[Tensor] = field(default_factory=list)  # the averaged gradients, as they lie in `grads`
    weights: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)

    def allocate(self, blocks: Sequence[Block], budget: float) -> None:
        """Allocate memory for any blocks of `budget` marked bytes together."""
        if not self.weights:
            self.weights, self.grads = allocate_flats(blocks, budget), allocate_flats(blocks, budget)

    def pack(self, blocks: Sequence[Block], factor: Tensor) -> list[Tensor]:
        """Copy this worker's gradients, times `factor`, to where they will travel from; return the copies."""
        grads = []
        for block, part in zip(blocks, split_by_block(self.grads, blocks, marked=True), strict=True):
            grads.append(part[: block.numel])
            torch.mul(block.grad, factor.to(part.device), out=grads[-1])
            part[block.numel :].copy_(block.marks)
        return grads

    def save_weights(self, blocks: Sequence[Block]) -> None:
        """Save the blocks' global weights, before predictions replace them."""
        for block, saved in zip(blocks, split_by_block(self.weights, blocks), strict=True):
            saved.copy_(block.weight)

    def send(
        self,
        port: Port,
        reducer: Reducer,
        blocks: Sequence[Block],
        absent: list[list[int]],
        rates: list[float],
    ) -> None:
        """Start to exchange the packed gradients, in the background; without a codec, by `reducer`."""
        if self.reduction.uses_codec(port):
            grads, marks = self._grads_and_marks(blocks)
            for block, grad in zip(blocks, grads, strict=True):
                self.reduction.start(grad, port, block.index)
            self.marks = [port.all_reduce(torch.cat([m.float() for m in marks]), lane=Lane.BACK)]
        else:
            for number, flat in enumerate(self._used(blocks)):
                self.reduction.start(flat, port, number, reducer)
        self.blocks, self.absent, self.rates = [block.index for block in blocks], absent, rates

    async def receive(self, port: Port, replica: Replica) -> None:
        """Wait for the exchange; with a codec, copy the decoded gradients and marks to their places."""
        if not self.reduction.pending:
            return
        self.arrived = await self.reduction.finish(port)
        if self.marks:
            blocks = [replica.blocks[i] for i in self.blocks]
            grads, marks = self._grads_and_marks(blocks)
            received = (await self.marks.pop()).split([len(part) for part in marks])
            for block, grad, part, mark in zip(blocks, grads, marks, received, strict=True):
                block.clear_gaps(grad)
                part.copy_(mark)
            self.arrived = self._used(blocks)

    def _used(self, blocks: Sequence[Block]) -> list[Tensor]:
        """Return the slices of the flat gradients that these blocks occupy."""
        sizes = [
            sum(p.numel() for p in split_by_block([flat], _same_kind(flat, blocks), marked=True))
            for flat in self.grads
        ]
        return [flat[:size] for flat, size in zip(self.grads, sizes, strict=True) if size]

    def _grads_and_marks(self, blocks: Sequence[Block]) -> tuple[list[Tensor], list[Tensor]]:
        parts = list(zip(blocks, split_by_block(self.grads, blocks, marked=True), strict=True))
        return [p[: b.numel] for b, p in parts], [p[b.numel :] for b, p in parts]

    def apply(self, replica: Replica, step: Step) -> list[tuple[Block, Tensor]]:
        """Restore the global weights and `step` them; return the blocks and their averaged gradients."""
        if not self.blocks:
            return []
        blocks = [replica.blocks[i] for i in self.blocks]
        parts = split_by_block(self.arrived, blocks, marked=True)
        # Parameters without a gradient on any worker. Marks are read only where this worker has no gradient.
        without: set[nn.Parameter] = set()
        for block, part, missing in zip(blocks, parts, self.absent, strict=True):
            marks = part[block.numel :]
            without.update(block.params[i] for i in missing if not marks[i].item() > 0)
        self.restore(replica)
        grads = [part[: block.numel] for block, part in zip(blocks, parts, strict=True)]
        step(blocks, grads, self.rates, without)
        return list(zip(blocks, grads, strict=True))

    @property
    def in_flight(self) -> bool:
        """True if the exchange has not been received yet."""
        return bool(self.reduction.pending)

    def restore(self, replica: Replica) -> None:
        """Replace the predicted weights by the global ones that were saved."""
        blocks = [replica.blocks[i] for i in self.blocks]
        for block, saved in zip(blocks, split_by_block(self.weights, blocks), strict=True):
            block.weight.copy_(saved)

    def clear(self) -> None:
        """Forget the blocks, which have been applied for good."""
        self.blocks, self.absent, self.rates, self.arrived = [], [], [], []

    def scratch(self, block: Block) -> Tensor:
        """Return memory as long as the block, at a time when no weights are saved."""
        return split_by_block(self.weights, [block])[0]


def allocate_flats(blocks: Sequence[Block], budget: float) -> list[Tensor]:
    """Allocate flat tensors that hold any blocks of `budget` marked bytes together, and any single block."""
    flats = []
    for kind in dict.fromkeys(_kind(block.weight) for block in blocks):
        sizes = [marked_bytes(block) for block in blocks if _kind(block.weight) == kind]
        nbytes = max(min(sum(sizes), int(budget)), *sizes, 0)
        flats.append(torch.empty(nbytes // kind[0].itemsize, dtype=kind[0], device=kind[1]))
    return flats


def split_by_block(flats: Sequence[Tensor], blocks: Sequence[Block], marked: bool = False) -> list[Tensor]:
    """Return the slice of each block in `flats`, with its marks or without."""
    by_kind = {_kind(flat): flat for flat in flats}
    ends = dict.fromkeys(by_kind, 0)
    parts = []
    for block in blocks:
        kind = _kind(block.weight)
        size = block.numel + (len(block.params) if marked else 0)
        parts.append(by_kind[kind][ends[kind] : ends[kind] + size])
        ends[kind] += size
    return parts


def _same_kind(flat: Tensor, blocks: Sequence[Block]) -> list[Block]:
    return [block for block in blocks if _kind(block.weight) == _kind(flat)]


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.device]:
    return tensor.dtype, tensor.device
