"""Results of collectives, added in the same order as by real ranks, so that virtual weights equal real ones.

Floating-point sums depend on their order. Gloo's ring all-reduce over N ranks sends a tensor as N chunks:
chunk c starts at rank c−1, then ranks c−2, c−3, … add theirs, until it ends at c. For large N, and on a GPU,
that order is not followed: one sum over a stack is faster, and there is no such ring to compare with. The
exchanges of slices between ranks (reduce-scatter) always add in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat.core.port import Op
from offbeat.core.slices import Slices

EXACT_UP_TO = 32
MAX_SEGMENT_BYTES = 1 << 20  # gloo splits chunks into segments, which rounds the chunks' sizes


def ring_sum(tensors: list[Tensor] | Tensor, mean: bool = False) -> Tensor:
    """Return the sum or the mean; a mean divides before it sums, as the port over processes does.

    `tensors` are the workers', in a list or as the rows of one tensor.
    """
    world = len(tensors)
    if world > EXACT_UP_TO or tensors[0].is_cuda:
        total = (tensors if isinstance(tensors, Tensor) else torch.stack(tensors)).sum(0)
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
    """Return the elements in a chunk of gloo's ring: whole segments, the same number for each rank."""
    segments = max(-(-numel * element_bytes // MAX_SEGMENT_BYTES), 2 * world)
    segments_per_rank = -(-segments // world)
    return segments_per_rank * -(-numel // (segments_per_rank * world))


def reduced(tensors: list[Tensor], op: Op) -> Tensor:
    """Return the result of a ring all-reduce, equal to the bit where the ring is small."""
    return torch.stack(tensors).amax(0) if op is Op.MAX else ring_sum(tensors, mean=op is Op.MEAN)


def all_reduce(tensors: list[Tensor], op: Op) -> None:
    """Write the result of a ring all-reduce into every tensor."""
    torch._foreach_copy_(tensors, [reduced(tensors, op)] * len(tensors))


def all_reduce_rows(stacks: list[Tensor], op: Op) -> None:
    """Write the result of `all_reduce` over the rows of all stacks into every row, equal to the bit."""
    rows = torch.cat(stacks)
    total = rows.amax(0) if op is Op.MAX else ring_sum(rows, mean=op is Op.MEAN)
    for stack in stacks:
        stack.copy_(total)


def reduce_scatter(slices: list[Sequence[Tensor]], op: Op) -> None:
    """Reduce `slices[w][r]` over all workers w into `slices[r][r]`, adding in the order of ranks."""
    combine = torch.maximum if op is Op.MAX else torch.add
    targets = _not_empty(slices[0])
    if not targets:
        return
    total = torch.empty(0)
    for rank, own_slices in enumerate(slices):  # all slices at once: each has the same order of ranks
        term = _joined(own_slices, targets)
        if op is Op.MEAN:
            term = term * (1 / len(slices))
        total = combine(total, term, out=total) if rank else term
    parts = total.split([slices[target][target].numel() for target in targets])
    for target, part in zip(targets, parts, strict=True):
        own = slices[target][target]
        own.copy_(part.view_as(own))


def all_gather(slices: list[Sequence[Tensor]]) -> None:
    """Copy worker r's own slice `slices[r][r]` into `slices[w][r]` of every worker w."""
    owners = _not_empty(slices[0])
    if not owners:
        return
    owned = [slices[owner][owner] for owner in owners]
    in_flat_memory = [each for each in slices if isinstance(each, Slices)]
    if in_flat_memory:
        joined = torch.cat([part.reshape(-1) for part in owned])
        for each in in_flat_memory:
            each.fill(joined)
    for own_slices in slices:
        if not isinstance(own_slices, Slices):
            torch._foreach_copy_([own_slices[owner] for owner in owners], owned)


def _not_empty(slices: Sequence[Tensor]) -> list[int]:
    """Return which slices have entries, the same of every worker: few, of a small model with many workers."""
    sizes = slices.sizes if isinstance(slices, Slices) else [part.numel() for part in slices]
    return [number for number, size in enumerate(sizes) if size]


def _joined(slices: Sequence[Tensor], numbers: list[int]) -> Tensor:
    """Return these slices, which are all that have entries, as one tensor: it may be the worker's own."""
    if isinstance(slices, Slices):
        return slices.joined()
    return torch.cat([slices[number].reshape(-1) for number in numbers])


def all_to_all(tensors: list[Sequence[Tensor]]) -> None:
    """Copy outgoing tensors to their targets; each worker lists its outgoing tensors, then its incoming."""
    world = len(tensors)
    for rank, own_tensors in enumerate(tensors):
        for other, incoming in enumerate(own_tensors[world:]):
            if other != rank:
                incoming.copy_(tensors[other][rank])
