"""Ring: the sum that gloo's ring all-reduce makes, in its order, so that virtual weights equal real ones.

Floating-point sums depend on their order. Around a ring of N, the tensor travels as N chunks; chunk c starts
at rank c−1 and is added to by c−2, c−3, … until it ends at c. Where N is large the order is given up: one
sum over a stack is faster, and no real ring is at hand to be compared with.
"""

from __future__ import annotations

import torch
from torch import Tensor

EXACT_UP_TO = 32
MAX_SEGMENT_BYTES = 1 << 20  # gloo cuts chunks further, which rounds their size


def ring_sum(tensors: list[Tensor], mean: bool = False) -> Tensor:
    """The sum, or the mean; a mean splittable before it sums, as the port over processes does."""
    world = len(tensors)
    if world > EXACT_UP_TO:
        total = torch.stack(tensors).sum(0)
        return total.mul_(1 / world) if mean else total
    flats = [tensor.reshape(-1) * (1 / world) if mean else tensor.reshape(-1) for tensor in tensors]
    total = torch.empty_like(flats[0])
    size = chunk_numel(total.numel(), total.element_size(), world)
    for chunk in range(world):
        part = slice(chunk * size, (chunk + 1) * size)
        into = total[part]
        if into.numel():
            into.copy_(flats[chunk - 1][part])
            for hop in range(2, world + 1):
                into += flats[chunk - hop][part]
    return total.view_as(tensors[0])


def chunk_numel(numel: int, element_bytes: int, world: int) -> int:
    """How many elements a chunk of gloo's ring has: whole segments, the same number for each rank."""
    segments = max(-(-numel * element_bytes // MAX_SEGMENT_BYTES), 2 * world)
    segments_per_rank = -(-segments // world)
    return segments_per_rank * -(-numel // (segments_per_rank * world))
