"""TopK: the entries of the largest magnitude, unchanged; all others count as 0.

    k = ratio · n, rounded, at least 1;   ‖x − decoded‖² ≤ (1 − k/n) ‖x‖²

A packet holds exactly k values and their indices, of 16 bits each. Where fewer than k entries differ from
0, it is filled up with zeros.

With `chunk` = c, the k largest of each c entries are sent, k = ratio · c (chunked_topk.py): the bound holds
in each chunk, indices have 8 bits where c < 256, and there are no counts. With `bits`, too, the values that
are sent are quantized (quantize.py bounds the error). Chunks are searched by torch, on a GPU as well.

With `sampled`, the search is faster and the result the same: a sample of 1% gives a threshold that slightly
more than k entries should pass (if fewer do, a lower one is tried), and the k largest are selected among
these.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from offbeat.codecs.base import Sparse
from offbeat.codecs.chunked_topk import MOST, add_chunks, chunked_nbytes, encode_chunks
from offbeat.codecs.cuda import ops
from offbeat.codecs.cuda import topk as cuda_topk
from offbeat.codecs.index_coding import (
    COUNT_DTYPE,
    INDEX_DTYPE,
    PAGE,
    count_pages,
    decode_indices,
    encode_indices,
)
from offbeat.codecs.quantize import BITS, Quantize
from offbeat.core.fields import Choice, Flag, Whole
from offbeat.core.finite import nan_if_not_finite
from offbeat.errors import SettingError

SAMPLE = 0.01  # of the entries
LEAST_SAMPLE = 8192
MARGIN = 1.2  # this many times k entries pass the threshold: few, but seldom too few
KERNEL_SIZES = range(1 << 20, 1 << 31)  # entries; torch's selection is as fast below; counts have 32 bits
PIECE = 1 << 16  # entries compared together: they stay in the cache


@dataclass(frozen=True)
class TopK(Sparse):
    """A codec that sends the fraction `ratio` of the entries that is largest in magnitude."""

    name = "topk"
    summary = "the largest entries by magnitude"

    sampled: Annotated[bool, Flag("find the largest entries with the help of a sample, which is faster")] = (
        True
    )

    chunk: Annotated[
        int | None,
        Whole("entries whose largest are sent; None: all of them", at_least=1, at_most=MOST),
    ] = None
    bits: Annotated[int | None, Choice("bits per value, in chunks; None: values as they are", of=BITS)] = None

    def check(self) -> None:
        if self.bits is not None and self.chunk is None:
            raise SettingError(f"bits={self.bits} without a chunk: give TopK(…, chunk=4096, bits=…)")

    @cached_property
    def _quantize(self) -> Quantize | None:
        return None if self.bits is None else Quantize(self.bits)

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        if self.chunk is not None:
            return chunked_nbytes(self, self.chunk, self._quantize, numel, dtype)
        counts = count_pages(numel) * COUNT_DTYPE.itemsize
        return counts + self.count(numel) * (dtype.itemsize + INDEX_DTYPE.itemsize)

    def encode(self, memory: Any, tensor: Tensor, packet: Tensor) -> None:
        if self.chunk is not None:
            encode_chunks(self, self.chunk, self._quantize, tensor, packet)
            return
        counts, values, entries = split_packet(packet, tensor)
        count = values.numel()
        if self.sampled and tensor.numel() in KERNEL_SIZES and ops.supports(tensor):
            cuda_topk.select(tensor, counts, values, entries)
            return
        if count == tensor.numel():
            chosen = torch.arange(count, device=tensor.device)
        elif self.sampled and not tensor.is_cuda:
            chosen = sampled_topk(tensor, count)
        else:
            chosen = full_topk(tensor, count)
        found = chosen.numel()
        torch.index_select(tensor, 0, chosen, out=values[:found])
        if found < count:
            values[found:] = 0
            last = torch.full((count - found,), tensor.numel() - 1, device=tensor.device)
            chosen = torch.cat([chosen, last])
        encode_indices(chosen, tensor.numel(), counts, entries)
        if not tensor.is_cuda:  # on a GPU, a NaN is the largest of all
            values[:1] += nan_if_not_finite(tensor)

    def accumulate(self, packet: Tensor, into: Tensor, factor: float = 1.0) -> None:
        if self.chunk is not None:
            add_chunks(self, self.chunk, self._quantize, packet, into, factor)
            return
        counts, values, entries = split_packet(packet, into)
        if counts.numel() and ops.supports(into):
            ops.add_paged(into, counts, values, entries, PAGE, factor)
            return
        into.index_add_(0, decode_indices(counts, entries, into.numel()), values, alpha=factor)


def split_packet(packet: Tensor, tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of a packet's counts, values and indices; its length tells their number."""
    counts_bytes = count_pages(tensor.numel()) * COUNT_DTYPE.itemsize
    count = (packet.numel() - counts_bytes) // (tensor.element_size() + INDEX_DTYPE.itemsize)
    sizes = {"counts": counts_bytes, "values": count * tensor.element_size()}
    order = ["values", "counts"] if tensor.element_size() >= COUNT_DTYPE.itemsize else ["counts", "values"]
    # the widest first, so that each begins at a multiple of its width
    *wide, entries = packet.split([*(sizes[part] for part in order), count * INDEX_DTYPE.itemsize])
    found = dict(zip(order, wide, strict=True))
    counts, values = found["counts"], found["values"]
    return counts.view(COUNT_DTYPE), values.view(tensor.dtype), entries.view(INDEX_DTYPE)


def sampled_topk(tensor: Tensor, count: int) -> Tensor:
    """Return the ascending indices of the `count` largest entries by magnitude, without those that are 0."""
    numel = tensor.numel()
    stride = max(1, numel // max(LEAST_SAMPLE, int(SAMPLE * numel)))
    sample = tensor[::stride].abs()
    wanted = MARGIN * count / numel * sample.numel()
    while True:
        rank = min(int(wanted + 2 * wanted**0.5) + 1, sample.numel())  # two sigma more than the margin
        threshold = sample.kthvalue(sample.numel() - rank + 1).values.item() if rank < sample.numel() else 0.0
        candidates = indices_above(tensor, threshold)
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


def full_topk(tensor: Tensor, count: int) -> Tensor:
    """Return the same indices by torch's own selection over all entries."""
    return torch.topk(tensor.abs(), count, sorted=False).indices.sort().values


def indices_above(tensor: Tensor, threshold: float) -> Tensor:
    """Return the ascending indices of the entries whose magnitude is above `threshold`."""
    magnitudes = torch.empty(PIECE, dtype=tensor.dtype)
    mask = torch.empty(PIECE, dtype=torch.bool)
    found = []
    for number, piece in enumerate(tensor.split(PIECE)):
        size = piece.numel()
        torch.gt(torch.abs(piece, out=magnitudes[:size]), threshold, out=mask[:size])
        # numpy's nonzero is 4x faster than torch's
        found.append(np.flatnonzero(mask[:size].numpy()) + number * PIECE)
    return torch.from_numpy(np.concatenate(found))
