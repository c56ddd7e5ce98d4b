"""Split of a model's blocks into late ones and important ones, and of these into runs that travel together.

Pure functions of numbers that all workers share, so that all workers split alike.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from offbeat.core.blocks import Block
from offbeat.core.members import part_of

UNKNOWN = math.inf  # the importance of a block whose averaged gradient has not arrived yet
# The last fraction of computing, in which gradients become ready. Backward is 2/3 of it; networks need slack.
BACKWARD_SEND_FRACTION = 0.5


def batch_norm_parameters(model: nn.Module) -> frozenset[nn.Parameter]:
    """Return the scales and shifts of all batch norms."""
    norms = (module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))
    return frozenset(param for norm in norms for param in norm.parameters(recurse=False))


def importance_of(kind: str, block: Block, grad: Tensor, scratch: Tensor) -> Tensor:
    """Return the mean |w·ḡ|, or |ḡ|, over the elements of a block. `scratch` is as long as the block.

    Of a sharded model it is this rank's summand of that mean: the members of a replica add theirs up.
    """
    product = torch.mul(block.weight, grad, out=scratch) if kind == "weight-gradient" else grad
    total = torch.abs(product, out=scratch).sum()  # 5x faster than torch's 1-norm, on a CPU
    return total / max(1, sum(part_of(param).members_numel for param in block.params))


def least_important(
    importance: Sequence[float], nbytes: Sequence[int], budget: float, pinned: Collection[int] = ()
) -> list[int]:
    """Choose the late blocks: the least important, as many as fit into `budget` bytes.

    A block that does not fit any more is skipped. Ties are broken by index. At least one block is not chosen,
    nor are those in `pinned`, and those whose importance is unknown or not a number.
    """
    known = [i for i, value in enumerate(importance) if i not in pinned and value < UNKNOWN]
    chosen = []
    for i in sorted(known, key=lambda i: (importance[i], i)):
        if nbytes[i] <= budget:
            budget -= nbytes[i]
            chosen.append(i)
    return sorted(chosen[: len(nbytes) - 1])


def contiguous_runs(
    blocks: Sequence[Block], late: Collection[int], first_bytes: int, block_bytes: int
) -> list[list[int]]:
    """Join the blocks that are not late into runs that travel together: neighbours in memory, up to a size.

    The last run is sent when backward ends. If the last block is late, that run is a single block, so that
    little is left to send then.
    """
    important = [block for block in blocks if block.index not in late]
    joined: list[list[int]] = []
    filled = 0
    for before, block in zip([None, *important], important, strict=False):
        alone = block is important[-1] and block is not blocks[-1]
        full = filled >= (first_bytes if len(joined) == 1 else block_bytes)
        if before is None or full or alone or not _neighbours(before, block):
            joined.append([])
            filled = 0
        joined[-1].append(block.index)
        filled += marked_bytes(block)
    return joined


def _neighbours(one: Block, other: Block) -> bool:
    alike = (one.weight.dtype, one.weight.device) == (other.weight.dtype, other.weight.device)
    return other.index == one.index + 1 and alike


def marked_bytes(block: Block) -> int:
    """Return how many bytes of a block travel: its gradient, and a mark for each parameter."""
    return (block.numel + len(block.params)) * block.weight.element_size()


def waiting_s(
    sent: Sequence[Sequence[int]],
    late: Collection[int],
    nbytes: Sequence[int],
    compute_s: float,
    bytes_per_s: float,
    late_ratio: float = 1.0,
) -> float:
    """Predict how long a step waits for the network after computing, if the blocks in `late` are late.

    These travel first, from the beginning of the step on, as `late_ratio` of their bytes; then the others in
    runs, each when its last gradient is ready. Gradients are assumed to become ready at a steady rate.
    """
    total, ready = sum(nbytes), list(accumulate(nbytes))
    clock = late_ratio * sum(nbytes[i] for i in late) / bytes_per_s
    for run in sent:
        done = 1.0 if run is sent[-1] else ready[run[-1]] / total  # fraction of backward
        clock = max(clock, compute_s * (1 - BACKWARD_SEND_FRACTION + BACKWARD_SEND_FRACTION * done))
        clock += sum(nbytes[i] for i in run) / bytes_per_s
    return max(0.0, clock - compute_s)


def hideable_bytes(compute_s: float, bytes_per_s: float, world: int) -> float:
    """Return the bytes that a ring all-reduces in `compute_s`: of each, 2(N−1)/N bytes leave a NIC."""
    return bytes_per_s * compute_s * world / (2 * (world - 1))
