"""Gradient buckets: gather gradients into blocks during backward, and say which blocks are complete.

Blocks are reported in the order of their indices, so that all workers send them in the same order even where
their graphs differ. A parameter without a gradient on this worker counts as zero, with a mark of
0; one without a gradient on any worker keeps `grad = None`, as under DDP, so that weight decay and momentum
leave it alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from offbeat.core.blocks import Block
from offbeat.core.no_grad import fast_no_grad
from offbeat.core.replica import Replica
from offbeat.errors import OffbeatError


def lay_out_gradients(replica: Replica) -> list[Tensor]:
    """Allocate flat gradients with their marks, per dtype and device, and give each block its span."""
    flats = []
    for (dtype, device), blocks in replica.flat_groups().items():
        sizes = [b.numel + len(b.params) for b in blocks]
        rows = blocks[0].weight.shape[:-1]
        flat = torch.zeros((*rows, sum(sizes)), dtype=dtype, device=device)
        for block, part in zip(blocks, flat.split(sizes, -1), strict=True):
            block.marked = part
            block.marks = part[..., block.numel :]
            block.grad_views = block.views(part)
        flats.append(flat)
    return flats


def copy_gradients(replica: Replica, into: list[Tensor]) -> None:
    """Copy gradients into flat tensors that are laid out as `replica.weights`; a missing gradient is 0."""
    targets, sources = [], []
    for flat, blocks in zip(into, replica.flat_groups().values(), strict=True):
        for block, part in zip(blocks, flat.split([b.numel for b in blocks]), strict=True):
            for param, view in zip(block.params, block.views(part), strict=True):
                if param.grad is None:
                    view.zero_()
                else:
                    _check_fits(block, param, param.grad, view)
                    targets.append(view)
                    sources.append(param.grad)
    if targets:
        torch._foreach_copy_(targets, sources)


def gradient_marks(replica: Replica) -> list[float]:
    """Return 1 for each parameter with a gradient, else 0, in the order of `replica.weights`."""
    blocks = [block for group in replica.flat_groups().values() for block in group]
    return [float(param.grad is not None) for block in blocks for param in block.params]


class GradientBuckets:
    """The gradients of one backward, gathered into blocks as they become ready."""

    def __init__(self, replica: Replica) -> None:
        lay_out_gradients(replica)
        self._blocks = replica.blocks
        self._blocks_of = {param: block for block in self._blocks for param in block.params}
        self._arrived: set[nn.Parameter] = set()
        self._outstanding: list[int] = []  # for each block, how many of its gradients are missing
        self._next = 0  # the first block not yet reported
        self._reset()

    def on_backward_start(self) -> None:
        """Prepare for a backward; raise an error if the last one failed after sending some of its blocks."""
        if self._next:
            raise OffbeatError(
                "the last backward() failed after some of its gradients had been sent, so the ranks are out "
                "of step; close() and attach again to continue"
            )
        self._clear_absent()
        self._reset()

    def on_gradient(self, param: nn.Parameter) -> Sequence[Block]:
        """Record that a parameter's gradient is complete; return the blocks that this completes, in order."""
        if param in self._arrived:
            return ()
        block = self._blocks_of[param]
        self._arrived.add(param)
        self._outstanding[block.index] -= 1
        if self._outstanding[self._next]:
            return ()
        with fast_no_grad():
            return self._pop_complete()

    def on_backward_end(self) -> list[Block]:
        """Gather the remaining gradients, zeros for missing ones; return the unreported blocks, in order."""
        if not self._arrived:  # no hook called `on_gradient`, nor `on_backward_start` before it
            self._clear_absent()
        with fast_no_grad():
            rest = self._blocks[self._next :]
            for block in rest:
                gather(block)
        if self._arrived:
            self._reset()
        return rest

    def check_complete(self) -> None:
        """Raise an error if a gradient was assigned after backward, to a parameter that had none."""
        for block in self._blocks:
            if block.nowhere:
                block.check_nowhere()

    def _reset(self) -> None:
        # One more entry than blocks, never 0: `_outstanding[_next]` is then defined after the last block.
        self._outstanding = [*(len(block.params) for block in self._blocks), 1]
        self._arrived.clear()
        self._next = 0

    def _clear_absent(self) -> None:
        """Forget the absent parameters of a step that did not hand out averaged gradients."""
        for block in self._blocks:
            block.absent.clear()
            block.nowhere.clear()

    def _pop_complete(self) -> list[Block]:
        complete = []
        while not self._outstanding[self._next]:
            block = self._blocks[self._next]
            self._next += 1
            gather(block)
            complete.append(block)
        return complete


def gather(block: Block) -> None:
    """Copy the gradients of a block's parameters into the block, of which they are views from then on.

    Where a parameter has none, the block gets zeros. All copies are one call: a compiled backward has all its
    gradients at once, and then a call for each of them would be on the way of the optimizer's step.
    """
    sources, targets = [], []
    for param, view in zip(block.params, block.grad_views, strict=True):
        grad = param.grad
        if grad is None:
            view.zero_()
            block.absent.append(param)
            continue
        _check_fits(block, param, grad, view)
        if grad.data_ptr() != view.data_ptr():
            sources.append(grad)
            targets.append(view)
            param.grad = view
    if targets:
        torch._foreach_copy_(targets, sources)
    block.mark()


def _check_fits(block: Block, param: nn.Parameter, grad: Tensor, view: Tensor) -> None:
    """Raise an error if a gradient would not be itself in a block."""
    if grad.layout is not torch.strided:
        raise OffbeatError(
            f"parameter {block.name_of(param)} has a sparse gradient, which cannot travel in a flat "
            "block; build its layer with sparse=False"
        )
    if grad.requires_grad:
        raise OffbeatError(
            f"the gradient of parameter {block.name_of(param)} has a graph of its own, by "
            "backward(create_graph=True), which averaging would cut off; take derivatives of gradients "
            "by torch.autograd.grad(create_graph=True) before backward(), or use LocalSGD or DiLoCo"
        )
    if grad.dtype != view.dtype:
        raise OffbeatError(
            f"parameter {block.name_of(param)} is {view.dtype}, but its gradient is {grad.dtype} (by "
            "grad_dtype), and would lose its digits in a block; leave grad_dtype as it is, or use "
            "LocalSGD or DiLoCo"
        )
