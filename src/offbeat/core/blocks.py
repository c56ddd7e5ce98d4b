"""Blocks: stretches of a model's flat weights and gradients, whole parameters, in the order of backward."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from offbeat.core.partition import ALIGNMENT_BYTES

BLOCKS = 12  # about, that a model is cut into
SMALLEST_BLOCK_BYTES = 256 << 10
LARGEST_BLOCK_BYTES = 8 << 20
FIRST_BLOCK_BYTES = 1 << 20  # at most, so that sending starts early in backward


class Matrix(NamedTuple):
    """A parameter's place in a flat tensor, as a matrix of its outermost dimension by all others."""

    offset: int
    rows: int
    cols: int


class Block:
    """Some parameters that travel together: a slice of the flat weights, and one of the flat gradients.

    `marked` is the gradient followed by one mark a parameter, 1 where this worker has a gradient for it.
    Averaged along with the gradient, the marks tell which parameters got one anywhere.
    """

    def __init__(self, index: int, names: list[str], params: list[nn.Parameter]) -> None:
        self.index = index
        self.names = names
        self.params = params
        self.offsets: list[int] = []
        # Memory formats such as channels_last are kept; strides with gaps in them are not.
        self.strides = [torch.empty_like(param, device="meta").stride() for param in params]
        self.numel = 0
        align = ALIGNMENT_BYTES // params[0].element_size()
        for param in params:
            self.offsets.append(self.numel)
            self.numel += -(-param.numel() // align) * align
        self.weight = torch.empty(0)  # laid out by the replica
        self.marked = torch.empty(0)
        self.marks = torch.empty(0)
        self.grad_views: list[Tensor] = []
        self.absent: list[nn.Parameter] = []  # got no gradient on this worker in this step

    @property
    def grad(self) -> Tensor:
        return self.marked[: self.numel]

    def mark(self) -> None:
        """Say in the marks which parameters have a gradient here."""
        self.marks.fill_(1)
        for param in self.absent:
            self.marks[self._position(param)] = 0

    def hand_out(self) -> None:
        """The gradient and its marks have been averaged: give the absent ones what the others found."""
        if not self.absent:
            return
        for param in self.absent:
            position = self._position(param)
            found = self.marks[position].item() > 0
            param.grad = self.grad_views[position] if found else None
        self.absent.clear()

    def take_absent(self) -> list[int]:
        """The positions of the absent ones; who takes them will hand out later what the others found."""
        positions = [self._position(param) for param in self.absent]
        self.absent.clear()
        return positions

    def matrices(self) -> list[Matrix]:
        """Each parameter as a matrix of its outermost dimension by all others, as it lies in memory."""
        found = []
        for param, stride, offset in zip(self.params, self.strides, self.offsets, strict=True):
            if param.numel():
                rows = max(zip(stride, param.shape, strict=True), default=(1, 1))[1]
                found.append(Matrix(offset, rows, param.numel() // rows))
        return found

    def clear_gaps(self, flat: Tensor) -> None:
        """Put zeros where `flat` belongs to no parameter: between two, for the sake of alignment."""
        starts = [*self.offsets[1:], self.numel]
        for param, offset, start in zip(self.params, self.offsets, starts, strict=True):
            if offset + param.numel() < start:
                flat[offset + param.numel() : start] = 0

    def places(self) -> Iterator[tuple[nn.Parameter, int]]:
        """Where each parameter begins in the flat weights."""
        begin = int(self.weight.storage_offset())
        return zip(self.params, (begin + offset for offset in self.offsets), strict=True)

    def name_of(self, param: nn.Parameter) -> str:
        return self.names[self._position(param)]

    def _position(self, param: nn.Parameter) -> int:
        return next(i for i, p in enumerate(self.params) if p is param)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parts of `flat` that belong to each parameter, in its shape and memory format."""
        return [
            flat.as_strided(param.shape, stride, int(flat.storage_offset()) + offset)
            for param, stride, offset in zip(self.params, self.strides, self.offsets, strict=True)
        ]


def block_sizes(nbytes: int) -> tuple[int, int]:
    """How large the first block and the others of a model should be, in bytes, to hide behind backward.

    The last block is complete when backward ends, and nothing hides it: of n blocks, 1/n of what sending
    takes is waited for. But each operation costs some time of its own, so blocks must not be too small.
    """
    block_bytes = min(max(nbytes // BLOCKS, SMALLEST_BLOCK_BYTES), LARGEST_BLOCK_BYTES)
    return min(block_bytes, FIRST_BLOCK_BYTES), block_bytes


def make_blocks(
    named: Iterable[tuple[str, nn.Parameter]],
    first_bytes: int,
    block_bytes: int,
    apart: Collection[nn.Parameter] = frozenset(),
) -> list[Block]:
    """Blocks of at least the given sizes, of whole parameters, in backward order (the reverse of forward).

    Parameters in `apart` share no block with others.
    """
    open_blocks: dict[tuple[torch.dtype, torch.device, bool], list[tuple[str, nn.Parameter]]] = {}
    filled: dict[tuple[torch.dtype, torch.device, bool], int] = {}
    closed: list[list[tuple[str, nn.Parameter]]] = []
    for name, param in reversed(list(named)):
        kind = (param.dtype, param.device, param in apart)
        open_blocks.setdefault(kind, []).append((name, param))
        filled[kind] = filled.get(kind, 0) + param.numel() * param.element_size()
        if filled[kind] >= (first_bytes if not closed else block_bytes):
            closed.append(open_blocks.pop(kind))
            del filled[kind]
    closed.extend(open_blocks.values())
    return [Block(i, [n for n, _ in part], [p for _, p in part]) for i, part in enumerate(closed)]


def trainable_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
