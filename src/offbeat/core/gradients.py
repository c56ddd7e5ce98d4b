"""Gradients: gathers what backward makes into blocks, and says when a block is complete.

Blocks are reported in their own order, never out of turn, so that all workers send them in the same order
even where their graphs differ. A parameter that got no gradient here counts as zero, with a mark of 0; one
that got none anywhere keeps `grad = None`, as under DDP, so that weight decay and momentum leave it alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from offbeat.core.blocks import Block
from offbeat.core.no_grad import fast_no_grad
from offbeat.core.replica import Replica
from offbeat.errors import OffbeatError


class GradientBuckets:
    def __init__(self, replica: Replica, report: Callable[[Block], None]) -> None:
        replica.lay_out_gradients()
        self._blocks = replica.blocks
        self._report = report
        self._home = {
            param: (block, view)
            for block in self._blocks
            for param, view in zip(block.params, block.grad_views, strict=True)
        }
        self._arrived: set[nn.Parameter] = set()
        self._outstanding: list[int] = []  # for each block, how many of its gradients are still to come
        self._next = 0  # the first block not yet reported
        self._reset()

    def on_backward_start(self) -> None:
        """A backward begins; the last one may have failed."""
        if self._next:
            raise OffbeatError(
                "the last backward() failed part way, after a part of its gradients had been sent: the ranks "
                "are out of step. close() and attach again to go on"
            )
        self._forget_absent()
        self._reset()

    def on_gradient(self, param: nn.Parameter) -> None:
        """Backward has completed this parameter's gradient."""
        if param in self._arrived:
            return
        block, view = self._home[param]
        with fast_no_grad():
            self._gather(block, param, view)
        self._arrived.add(param)
        self._outstanding[block.index] -= 1
        self._report_complete()

    def on_backward_end(self) -> None:
        """Backward has ended: what has not come by now will not come."""
        if not self._arrived:  # nothing came through `arrived`, where `begin` is called first
            self._forget_absent()
        with fast_no_grad():
            if len(self._arrived) < len(self._home):
                for param, (block, view) in self._home.items():
                    if not self._arrived or param not in self._arrived:
                        self._settle_late(block, param, view)
            for block in self._blocks[self._next :]:
                block.mark()
                self._report(block)
        if self._arrived:
            self._reset()

    def _reset(self) -> None:
        self._outstanding = [len(block.params) for block in self._blocks]
        self._arrived.clear()
        self._next = 0

    def _forget_absent(self) -> None:
        """Not every step hands out what the others found."""
        for block in self._blocks:
            block.absent.clear()

    def _settle_late(self, block: Block, param: nn.Parameter, view: Tensor) -> None:
        if param.grad is not None:  # from an earlier backward, under no_sync
            self._gather(block, param, view)
        else:
            view.zero_()
            block.absent.append(param)

    def _gather(self, block: Block, param: nn.Parameter, view: Tensor) -> None:
        grad = param.grad
        assert grad is not None
        if grad.layout is not torch.strided:
            raise OffbeatError(
                f"parameter {block.name_of(param)} has a sparse gradient, which cannot travel in a flat "
                "block; build its layer with sparse=False"
            )
        if grad.data_ptr() != view.data_ptr():
            view.copy_(grad)
            param.grad = view

    def _report_complete(self) -> None:
        while self._next < len(self._blocks) and not self._outstanding[self._next]:
            block = self._blocks[self._next]
            self._next += 1
            block.mark()
            self._report(block)
