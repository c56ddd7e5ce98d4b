"""PublishedModel: the weights and buffers to evaluate or save, beside those that a worker trains on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offbeat.core.replica import Replica

PIECE = 1 << 20  # entries that are exchanged at a time


@dataclass(frozen=True)
class PublishedModel:
    """Tensors as a replica has them. A tensor may be the replica's own, if that is what is published."""

    weights: list[Tensor]
    buffers: list[Tensor]  # in the order of `BufferSync.all`; empty if they stay as they are
    untrained: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # a tensor of the model, its value

    def show(self, replica: Replica) -> Callable[[], None]:
        """Exchange the replica's tensors for these; return a function that exchanges them back."""
        pairs = [*zip(replica.weights, self.weights, strict=True)]
        pairs += zip(replica.buffers.all(), self.buffers, strict=False)
        pairs += self.untrained
        pairs = [(own, shown) for own, shown in pairs if own is not shown]

        def swap() -> None:
            with torch.no_grad():
                for own, shown in pairs:
                    swap_values(own, shown)

        swap()
        return swap


def swap_values(one: Tensor, other: Tensor) -> None:
    """Exchange the values of two tensors of one shape, a piece at a time: a model may fill half a GPU."""
    if not (one.is_contiguous() and other.is_contiguous()):
        before = one.clone()
        one.copy_(other)
        other.copy_(before)
        return
    for left, right in zip(one.view(-1).split(PIECE), other.view(-1).split(PIECE), strict=True):
        before = left.clone()
        left.copy_(right)
        right.copy_(before)
