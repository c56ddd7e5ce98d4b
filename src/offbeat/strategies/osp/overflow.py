"""Overflow and clipping of late gradients, which the user's loop does not see: each worker has its own.

Late gradients must be changed as the loop changes the visible ones: they are multiplied by the same factor
(unscaling, clipping by norm). And an overflow among them must be found by the GradScalers of all workers, or
of none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from offbeat.core.blocks import Block
from offbeat.core.finite import nan_if_not_finite
from offbeat.core.replica import Replica


def flag_overflow(hidden: Iterable[Block], flagged: Block) -> None:
    """Put NaN into the last mark of `flagged`, which is averaged next, if a hidden gradient is not finite."""
    for block in hidden:
        flagged.marks[-1] += nan_if_not_finite(block.grad).to(flagged.marks.device)


def propagate_overflow(visible: Sequence[Block], flagged: Block) -> None:
    """Put NaN into the first visible gradient if any rank overflowed, so that every GradScaler skips."""
    flag = flagged.marks[-1] * 0
    for block in visible:
        for param, offset in zip(block.params, block.offsets, strict=True):
            if param.grad is not None and param.numel():
                block.grad[offset] += flag.to(block.grad.device)
                return


def norm_of(blocks: Iterable[Block]) -> Tensor:
    """Return the norm of the blocks' gradients, as the loop sees them."""
    grads = [param.grad for block in blocks for param in block.params if param.grad is not None]
    if not grads:
        return torch.zeros(())
    wide = torch.float64 if any(grad.dtype == torch.float64 for grad in grads) else torch.float32
    norms = torch._foreach_norm(grads, 2, dtype=wide)
    whole: Tensor = torch.stack([norm.to(norms[0].device) for norm in norms]).norm()
    return whole


async def whole_norm(replica: Replica, blocks: Iterable[Block]) -> Tensor:
    """Return the norm of the blocks' gradients; of a sharded model, over the parts of all members."""
    norm = norm_of(blocks)
    if not replica.members.sharded:
        return norm
    square = norm.double().to(replica.members.device).square().reshape(1)
    return (await replica.members.whole(square)).sqrt().to(norm.dtype).squeeze(0)


def clip_factor(before: Tensor, after: Tensor) -> Tensor:
    """Return the factor by which the loop multiplied; exactly 1 if it changed nothing, or the norm is 0."""
    return (after / before).nan_to_num_(1.0, 1.0, 1.0)
