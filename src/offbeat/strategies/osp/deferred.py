"""Late: blocks whose gradients travel behind the next step's computation.

In the replica their weights are a prediction meanwhile; the global ones are kept here, until the averaged
gradients are in and the user's own optimizer steps them, at the learning rates of the step they came from.
Blocks lie one after the other in one flat tensor for each dtype and device, so that they travel at once.

With a codec each block travels by itself, since what a codec remembers is a block's own, and the marks, which
must be exact, in one tensor. Once they have come they are put where they would have been.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.codecs import Codec, Stream, exchange_and_finish
from offbeat.core.blocks import Block
from offbeat.core.pending import Arrived, Pending
from offbeat.core.port import Lane, Port, Reducer
from offbeat.core.replica import Replica
from offbeat.strategies.osp.split import marked_bytes

Step = Callable[[list[Block], list[Tensor], list[float], set[nn.Parameter]], None]


@dataclass
class DeferredBlocks:
    """A part of a strategy's state. Its memory is taken once."""

    blocks: list[int] = field(default_factory=list)
    absent: list[list[int]] = field(default_factory=list)  # by block: which parameters got no gradient here
    rates: list[float] = field(default_factory=list)
    reductions: list[Pending[Any]] = field(default_factory=list)
    coded: bool = False  # they are packets, which are still to be decoded
    wires: list[Stream] = field(default_factory=list)  # with a codec, by block
    weights: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)

    def make_room(self, blocks: Sequence[Block], budget: float) -> None:
        """For any blocks of `budget` marked bytes together."""
        if not self.weights:
            self.weights, self.grads = room(blocks, budget), room(blocks, budget)

    def pack(self, blocks: Sequence[Block], factor: Tensor) -> list[Tensor]:
        """Copy the gradients of this worker, times `factor`, to where they will travel from."""
        grads = []
        for block, part in zip(blocks, packed(self.grads, blocks, marked=True), strict=True):
            grads.append(part[: block.numel])
            torch.mul(block.grad, factor.to(part.device), out=grads[-1])
            part[block.numel :].copy_(block.marks)
        return grads

    def keep(self, blocks: Sequence[Block]) -> None:
        """Remember the global weights, before they are predicted."""
        for block, kept in zip(blocks, packed(self.weights, blocks), strict=True):
            kept.copy_(block.weight)

    def send(
        self,
        port: Port,
        reducer: Reducer,
        blocks: Sequence[Block],
        absent: list[list[int]],
        rates: list[float],
        codec: Codec | None = None,
    ) -> None:
        """What is packed starts to travel, in the background."""
        if codec is None:
            self.reductions = [reducer.all_reduce(flat, lane=Lane.BACK) for flat in self._used(blocks)]
        else:
            grads, marks = self._parted(blocks)
            wires = [self.wires[block.index] for block in blocks]
            self.reductions = [codec.start(w, grad, port) for w, grad in zip(wires, grads, strict=True)]
            self.reductions.append(port.all_reduce(torch.cat([m.float() for m in marks]), lane=Lane.BACK))
            self.coded = True
        self.blocks, self.absent, self.rates = [block.index for block in blocks], absent, rates

    async def land(self, port: Port, replica: Replica, codec: Codec | None) -> None:
        """Wait for what is under way; with a codec, put what it decodes to where it would have been."""
        if codec is not None and self.coded:
            blocks = [replica.blocks[i] for i in self.blocks]
            grads, marks = self._parted(blocks)
            *sent, marked = self.reductions
            await exchange_and_finish(codec, [self.wires[i] for i in self.blocks], grads, port, sent)
            told = (await marked).split([len(part) for part in marks])
            for block, grad, part, mark in zip(blocks, grads, marks, told, strict=True):
                block.clear_gaps(grad)
                part.copy_(mark)
            self.reductions, self.coded = [Arrived(flat) for flat in self._used(blocks)], False
        for reduction in self.reductions:
            await reduction

    def _used(self, blocks: Sequence[Block]) -> list[Tensor]:
        """The stretches of flat tensors that these blocks take."""
        sizes = [sum(p.numel() for p in packed([flat], _of_kind(flat, blocks), True)) for flat in self.grads]
        return [flat[:size] for flat, size in zip(self.grads, sizes, strict=True) if size]

    def _parted(self, blocks: Sequence[Block]) -> tuple[list[Tensor], list[Tensor]]:
        """Each block's gradient, and its marks."""
        parts = list(zip(blocks, packed(self.grads, blocks, marked=True), strict=True))
        return [p[: b.numel] for b, p in parts], [p[b.numel :] for b, p in parts]

    async def bring_in(self, replica: Replica, step: Step) -> list[tuple[Block, Tensor]]:
        """Put the global weights in place, and `step` them; the blocks, and their averaged gradients."""
        if not self.blocks:
            return []
        arrived = [await reduction for reduction in self.reductions]
        blocks = [replica.blocks[i] for i in self.blocks]
        parts = packed(arrived, blocks, marked=True)
        nowhere: set[nn.Parameter] = set()  # only who lacks a gradient needs to look whether anybody has it
        for block, part, missing in zip(blocks, parts, self.absent, strict=True):
            marks = part[block.numel :]
            nowhere.update(block.params[i] for i in missing if not marks[i].item() > 0)
        for block, kept in zip(blocks, packed(self.weights, blocks), strict=True):
            block.weight.copy_(kept)
        grads = [part[: block.numel] for block, part in zip(blocks, parts, strict=True)]
        step(blocks, grads, self.rates, nowhere)
        return list(zip(blocks, grads, strict=True))

    def forget(self) -> None:
        """It has been brought in for good."""
        self.blocks, self.absent, self.rates, self.reductions, self.coded = [], [], [], [], False

    def scratch(self, block: Block) -> Tensor:
        """Memory as long as the block, at a time when no weights are kept."""
        return packed(self.weights, [block])[0]


def room(blocks: Sequence[Block], budget: float) -> list[Tensor]:
    """Flat tensors that hold any blocks of `budget` marked bytes together, and any single one."""
    flats = []
    for kind in dict.fromkeys(_kind(block.weight) for block in blocks):
        sizes = [marked_bytes(block) for block in blocks if _kind(block.weight) == kind]
        nbytes = max(min(sum(sizes), int(budget)), *sizes, 0)
        flats.append(torch.empty(nbytes // kind[0].itemsize, dtype=kind[0], device=kind[1]))
    return flats


def packed(flats: Sequence[Tensor], blocks: Sequence[Block], marked: bool = False) -> list[Tensor]:
    """The part of each block in `flats`, with room for its marks or without."""
    by_kind = {_kind(flat): flat for flat in flats}
    ends = dict.fromkeys(by_kind, 0)
    parts = []
    for block in blocks:
        kind = _kind(block.weight)
        size = block.numel + (len(block.params) if marked else 0)
        parts.append(by_kind[kind][ends[kind] : ends[kind] + size])
        ends[kind] += size
    return parts


def _of_kind(flat: Tensor, blocks: Sequence[Block]) -> list[Block]:
    return [block for block in blocks if _kind(block.weight) == _kind(flat)]


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.device]:
    return tensor.dtype, tensor.device
