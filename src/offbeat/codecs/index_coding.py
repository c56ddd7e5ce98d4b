"""Index coding: ascending indices in 16 bits each, whatever the tensor's size.

A tensor is cut into pages of 65,536 entries. An index is stored as its place in its page, and a count per
page tells how many indices lie there. A tensor of one page needs no counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.errors import OffbeatError

PAGE = 1 << 16
COUNT_DTYPE = torch.int32
INDEX_DTYPE = torch.uint16


def count_pages(numel: int) -> int:
    """Return how many counts the indices into `numel` entries need."""
    return -(-numel // PAGE) if numel > PAGE else 0


def encode_indices(indices: Tensor, numel: int, counts: Tensor, entries: Tensor) -> None:
    """Fill `counts` and `entries` with `indices` (int64, ascending) into a tensor of `numel` entries."""
    entries.copy_(indices % PAGE if counts.numel() else indices)
    if counts.numel():
        starts = torch.arange(0, numel, PAGE, device=indices.device)
        firsts = torch.searchsorted(indices, starts)
        counts.copy_(torch.diff(firsts, append=firsts.new_tensor([indices.numel()])))


def decode_indices(counts: Tensor, entries: Tensor, numel: int) -> Tensor:
    """Return the indices that `encode_indices` stored; on a CPU, refuse what no encoder writes."""
    indices = entries.to(torch.int64)
    if counts.numel():
        if not counts.is_cuda and (counts.min() < 0 or counts.sum() != entries.numel()):
            raise OffbeatError("a packet's counts do not match its indices")
        starts = torch.arange(0, numel, PAGE, device=entries.device)
        indices += starts.repeat_interleave(counts.to(torch.int64), output_size=entries.numel())
    if not indices.is_cuda and indices.numel() and indices.max() >= numel:
        raise OffbeatError(f"a packet has an index beyond the {numel} entries of its tensor")
    return indices
