"""Blocks of a model: parameters that travel together, in the order in which backward completes them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offbeat.core.members import part_of
from offbeat.core.partition import ALIGNMENT_BYTES
from offbeat.errors import OffbeatError

BLOCKS = 12  # approximate number of blocks per model
SMALLEST_BLOCK_BYTES = 256 << 10
LARGEST_BLOCK_BYTES = 8 << 20
FIRST_BLOCK_BYTES = 1 << 20  # upper bound, so that sending starts early in backward


class Matrix(NamedTuple):
    """A parameter's place in a flat tensor, as a matrix of its outermost dimension by all others."""

    offset: int
    rows: int
    cols: int


class Block:
    """Parameters that travel together: a span of the flat weights, and one of the flat gradients.

    `marked` is the gradient followed by one mark per parameter: 1 where this worker has a gradient for the
    parameter, else 0. Averaged along with the gradient, the marks tell which parameters have a gradient on
    any worker.

    In virtual time a block may hold several workers that are alike: its tensors then have one row for each.
    """

    def __init__(self, index: int, names: list[str], params: list[nn.Parameter]) -> None:
        self.index = index
        self.names = names
        self.params = params
        self.offsets: list[int] = []
        self.shapes = [param.shape for param in params]
        # Memory formats such as channels_last are preserved; strides with gaps are not.
        self.strides = [torch.empty_like(param, device="meta").stride() for param in params]
        self.first = next((i for i, param in enumerate(params) if param.numel()), None)  # that is not empty
        self.numel = 0
        align = ALIGNMENT_BYTES // params[0].element_size()
        for param in params:
            self.offsets.append(self.numel)
            self.numel += -(-part_of(param).room // align) * align
        self.weight = torch.empty(0)  # set by Replica; the rest by gradients.lay_out_gradients
        self.marked = torch.empty(0)
        self.marks = torch.empty(0)
        self.grad_views: list[Tensor] = []
        self.absent: list[nn.Parameter] = []  # have no gradient on this worker in this step
        self.nowhere: list[nn.Parameter] = []  # had none on any worker

    @property
    def grad(self) -> Tensor:
        """The flat gradient, without the marks."""
        return self.marked[..., : self.numel]

    def mark(self) -> None:
        """Set the marks: 1 for parameters with a gradient on this worker, 0 for the absent ones."""
        self.marks.fill_(1)
        for param in self.absent:
            self.marks[self._position(param)] = 0

    def hand_out(self) -> None:
        """Give absent parameters the averaged gradient, if any worker had one. Called after averaging."""
        if not self.absent:
            return
        for param in self.absent:
            position = self._position(param)
            has_gradient = self.marks[position].item() > 0
            param.grad = self.grad_views[position] if has_gradient else None
            if not has_gradient:
                self.nowhere.append(param)
        self.absent.clear()

    def check_nowhere(self) -> None:
        """Raise an error if a parameter that had no gradient on any worker has one by now."""
        for param in self.nowhere:
            if param.grad is not None:
                raise OffbeatError(
                    f"parameter {self.name_of(param)} had no gradient on any rank when backward() ended, and "
                    "has one now, which no other rank has seen: assign gradients before the last backward() "
                    "of a step, or compute all of them inside no_sync(), and they are averaged at the step"
                )

    def take_absent(self) -> list[int]:
        """Return and clear the positions of the absent parameters: the caller assigns their gradients."""
        positions = [self._position(param) for param in self.absent]
        self.absent.clear()
        return positions

    def matrices(self) -> list[Matrix]:
        """Return each parameter as a matrix, outermost dimension by all others, in the order of memory."""
        found = []
        for param, stride, offset in zip(self.params, self.strides, self.offsets, strict=True):
            if param.numel():
                rows = max(zip(stride, param.shape, strict=True), default=(1, 1))[1]
                found.append(Matrix(offset, rows, param.numel() // rows))
        return found

    def clear_gaps(self, flat: Tensor) -> None:
        """Zero the elements of `flat` between parameters, which exist for alignment only."""
        starts = [*self.offsets[1:], self.numel]
        for param, offset, start in zip(self.params, self.offsets, starts, strict=True):
            if offset + param.numel() < start:
                flat[offset + param.numel() : start] = 0

    def places(self) -> Iterator[tuple[nn.Parameter, int]]:
        """Yield each parameter with its offset in the flat weights."""
        begin = int(self.weight.storage_offset())
        return zip(self.params, (begin + offset for offset in self.offsets), strict=True)

    def name_of(self, param: nn.Parameter) -> str:
        """Return the parameter's name in the model."""
        return self.names[self._position(param)]

    def _position(self, param: nn.Parameter) -> int:
        return next(i for i, p in enumerate(self.params) if p is param)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return each parameter's span of `flat`, or of each row, in its shape and memory format."""
        rows, apart, begin = flat.shape[:-1], flat.stride()[:-1], int(flat.storage_offset())
        return [
            flat.as_strided((*rows, *shape), (*apart, *stride), begin + offset)
            for shape, stride, offset in zip(self.shapes, self.strides, self.offsets, strict=True)
        ]


@dataclass(frozen=True)
class Layout:
    """Division of a model into blocks, as a strategy asks for it."""

    first_bytes: int
    block_bytes: int
    isolate: frozenset[nn.Parameter] = frozenset()
    """Parameters that share no block with others."""
    gradients: bool = False
    """Gather gradients into blocks during backward, and call `Strategy.ready` for each complete block."""
    gathers_alone: bool = True
    """Gather gradients of a worker without others, too.

    A strategy that does nothing with blocks but average them sets this to False: without others, each
    gradient then stays where autograd put it, and `ready` is not called. A subclass that changes `ready` or
    `step` has to define `layout` again, or the gradients are gathered.
    """
    keeps_loaded: bool = True
    """Begin with the weights that the model has at the first step, even if they were loaded after attach."""
    keeps_edits: bool = True
    """Go on from weights that the loop changes by itself between two steps.

    Otherwise, and where a server has other weights at the first step, a loop that does so is refused.
    """
    rowwise: bool = False
    """Let virtual workers that are alike be computed together, as the rows of each tensor.

    Such a strategy treats weights and gradients elementwise, exchanges nothing but all-reduces of them, and
    decides by the number of steps alone: neither by values nor by rank. A subclass that changes another
    method of the strategy has to define `layout` again, or its workers are computed one by one.
    """

    @classmethod
    def default(cls, model: nn.Module, **changes: Any) -> Layout:
        """Return a layout with the block sizes that overlap backward best; `changes` replace fields."""
        return replace(cls(*block_sizes(trainable_bytes(model))), **changes)


def block_sizes(nbytes: int) -> tuple[int, int]:
    """Return the sizes in bytes, of the first block and of all others, that overlap backward best.

    The last block is complete only when backward ends, so nothing hides its transfer: with n blocks, workers
    wait for 1/n of the sending time. But each operation has a cost of its own, so blocks must not be too
    small.
    """
    block_bytes = min(max(nbytes // BLOCKS, SMALLEST_BLOCK_BYTES), LARGEST_BLOCK_BYTES)
    return min(block_bytes, FIRST_BLOCK_BYTES), block_bytes


def make_blocks(
    named: Iterable[tuple[str, nn.Parameter]],
    first_bytes: int,
    block_bytes: int,
    isolate: Collection[nn.Parameter] = frozenset(),
) -> list[Block]:
    """Cut parameters into blocks of at least the given sizes, in backward order (the reverse of forward).

    Parameters in `isolate` share no block with others.
    """
    open_blocks: dict[tuple[torch.dtype, torch.device, bool], list[tuple[str, nn.Parameter]]] = {}
    filled: dict[tuple[torch.dtype, torch.device, bool], int] = {}
    closed: list[list[tuple[str, nn.Parameter]]] = []
    for name, param in reversed(list(named)):
        kind = (param.dtype, param.device, param in isolate)
        open_blocks.setdefault(kind, []).append((name, param))
        filled[kind] = filled.get(kind, 0) + part_of(param).room * param.element_size()
        if filled[kind] >= (first_bytes if not closed else block_bytes):
            closed.append(open_blocks.pop(kind))
            del filled[kind]
    closed.extend(open_blocks.values())
    return [Block(i, [n for n, _ in part], [p for _, p in part]) for i, part in enumerate(closed)]


def trainable_bytes(model: nn.Module) -> int:
    """Return the bytes of all trainable parameters."""
    return sum(part_of(p).room * p.element_size() for p in model.parameters() if p.requires_grad)
