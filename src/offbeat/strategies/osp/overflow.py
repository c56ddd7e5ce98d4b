"""Withheld: gradients that the user's loop does not see, because each worker has its own.

What the loop does to the others must come to them as well: the factor by which it multiplies (unscaling,
clipping by norm). And an overflow among them must be found by the GradScalers of all workers, or of none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from offbeat.core.blocks import Block
from offbeat.core.finite import nan_if_not_finite


def flag_overflow(withheld: Iterable[Block], carrier: Block) -> None:
    """If a withheld gradient is not finite here, neither is the carrier's last mark; then average it."""
    for block in withheld:
        carrier.marks[-1] += nan_if_not_finite(block.grad).to(carrier.marks.device)


def propagate_overflow(seen: Sequence[Block], carrier: Block) -> None:
    """If the carrier's last mark came back not finite, no more is the first gradient that the loop sees."""
    flag = carrier.marks[-1] * 0
    for block in seen:
        for param, offset in zip(block.params, block.offsets, strict=True):
            if param.grad is not None and param.numel():
                block.grad[offset] += flag.to(block.grad.device)
                return


def norm_of(blocks: Iterable[Block]) -> Tensor:
    """The norm of gradients as the loop sees them."""
    grads = [param.grad for block in blocks for param in block.params if param.grad is not None]
    if not grads:
        return torch.zeros(())
    wide = torch.float64 if any(grad.dtype == torch.float64 for grad in grads) else torch.float32
    norms = torch._foreach_norm(grads, 2, dtype=wide)
    whole: Tensor = torch.stack([norm.to(norms[0].device) for norm in norms]).norm()
    return whole


def clip_factor(before: Tensor, after: Tensor) -> Tensor:
    """By how much the loop multiplied; exactly 1 if it did nothing, or if there was nothing to multiply."""
    return (after / before).nan_to_num_(1.0, 1.0, 1.0)
