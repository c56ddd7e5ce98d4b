"""TopK: the entries of the largest magnitude, exactly as they are; all others count as 0.

    k = ratio · n, rounded, at least 1;   ‖x − decoded‖² ≤ (1 − k/n) ‖x‖²

A packet holds exactly k values and their indices, of 16 bits each. Where fewer than k entries differ from
0, it is filled up with zeros.

With `sampled`, k entries are not sought among all n: a sample of 1% tells a threshold that some more than
k entries should pass (a lower one is tried should fewer do), and the k largest are sought among these.
They are the k largest of all: only the way to them is shorter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from offbeat.codecs import index_coding as indices
from offbeat.codecs.base import Sparse
from offbeat.codecs.cuda import ops as kernels
from offbeat.codecs.cuda import topk as selection
from offbeat.core.fields import Flag
from offbeat.core.finite import nan_if_not_finite

SAMPLE = 0.01  # of the entries
LEAST_SAMPLE = 8192
MARGIN = 1.2  # candidates are sought for so many times k: few enough, and seldom too few
ON_GPU = range(1 << 20, 1 << 31)  # entries; below, torch's own selection is as fast; counts are of 32 bits
PIECE = 1 << 16  # entries looked at together: they stay in the cache


@dataclass(frozen=True)
class TopK(Sparse):
    """The `ratio` of entries that are largest in magnitude."""

    name = "topk"

    sampled: Annotated[bool, Flag("find the largest entries with the help of a sample, which is faster")] = (
        True
    )

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        counts = indices.pages(numel) * indices.COUNT.itemsize
        return counts + self.count(numel) * (dtype.itemsize + indices.ENTRY.itemsize)

    def encode(self, memory: Any, tensor: Tensor, packet: Tensor) -> None:
        counts, values, entries = parts(packet, tensor)
        count = values.numel()
        if self.sampled and tensor.numel() in ON_GPU and kernels.fits(tensor):
            selection.select(tensor, counts, values, entries)
            return
        if count == tensor.numel():
            chosen = torch.arange(count, device=tensor.device)
        elif self.sampled and not tensor.is_cuda:
            chosen = largest(tensor, count)
        else:
            chosen = by_selection(tensor, count)
        found = chosen.numel()
        torch.index_select(tensor, 0, chosen, out=values[:found])
        if found < count:
            values[found:] = 0
            last = torch.full((count - found,), tensor.numel() - 1, device=tensor.device)
            chosen = torch.cat([chosen, last])
        indices.write(chosen, tensor.numel(), counts, entries)
        if not tensor.is_cuda:  # there, a NaN is the largest of all
            values[:1] += nan_if_not_finite(tensor)

    def accumulate(self, packet: Tensor, into: Tensor, factor: float = 1.0) -> None:
        counts, values, entries = parts(packet, into)
        if counts.numel() and kernels.fits(into):
            kernels.scatter(into, counts, values, entries, indices.PAGE, factor)
            return
        into.index_add_(0, indices.read(counts, entries, into.numel()), values, alpha=factor)


def parts(packet: Tensor, tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A packet's counts, values and indices. How many there are follows from its length."""
    counts_bytes = indices.pages(tensor.numel()) * indices.COUNT.itemsize
    count = (packet.numel() - counts_bytes) // (tensor.element_size() + indices.ENTRY.itemsize)
    sizes = {"counts": counts_bytes, "values": count * tensor.element_size()}
    order = ["values", "counts"] if tensor.element_size() >= indices.COUNT.itemsize else ["counts", "values"]
    # the widest first, so that each begins at a multiple of its width
    *wide, entries = packet.split([*(sizes[part] for part in order), count * indices.ENTRY.itemsize])
    found = dict(zip(order, wide, strict=True))
    counts, values = found["counts"], found["values"]
    return counts.view(indices.COUNT), values.view(tensor.dtype), entries.view(indices.ENTRY)


def largest(tensor: Tensor, count: int) -> Tensor:
    """The indices of the `count` entries of the largest magnitude, in order; of those that are not 0."""
    numel = tensor.numel()
    stride = max(1, numel // max(LEAST_SAMPLE, int(SAMPLE * numel)))
    sample = tensor[::stride].abs()
    wanted = MARGIN * count / numel * sample.numel()
    while True:
        rank = min(int(wanted + 2 * wanted**0.5) + 1, sample.numel())  # two sigma more than the margin
        threshold = sample.kthvalue(sample.numel() - rank + 1).values.item() if rank < sample.numel() else 0.0
        candidates = above(tensor, threshold)
        if candidates.numel() >= count or threshold == 0.0:
            break
        wanted *= 2
    if candidates.numel() <= count:
        return candidates
    sizes = tensor[candidates].abs_()
    least = sizes.kthvalue(sizes.numel() - count + 1).values
    chosen = sizes > least
    ties = (sizes == least).nonzero().view(-1)
    chosen[ties[: count - int(chosen.sum())]] = True
    return candidates[chosen]


def by_selection(tensor: Tensor, count: int) -> Tensor:
    """The same by torch's own selection over all entries."""
    return torch.topk(tensor.abs(), count, sorted=False).indices.sort().values


def above(tensor: Tensor, threshold: float) -> Tensor:
    """The indices of entries of a larger magnitude, in order."""
    room = torch.empty(PIECE, dtype=tensor.dtype)
    mask = torch.empty(PIECE, dtype=torch.bool)
    found = []
    for number, piece in enumerate(tensor.split(PIECE)):
        size = piece.numel()
        torch.gt(torch.abs(piece, out=room[:size]), threshold, out=mask[:size])
        # numpy's own is four times as fast as torch's
        found.append(np.flatnonzero(mask[:size].numpy()) + number * PIECE)
    return torch.from_numpy(np.concatenate(found))
