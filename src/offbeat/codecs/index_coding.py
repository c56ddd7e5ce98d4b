"""Indices, in 16 bits each whatever the size: a tensor is cut into pages of 65,536 entries.

Indices are in order, so how many lie in each page tells which page an index belongs to. A tensor of one
page needs no counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.errors import OffbeatError

PAGE = 1 << 16
COUNT = torch.int32
ENTRY = torch.uint16


def pages(numel: int) -> int:
    """How many counts go with indices into so many entries."""
    return -(-numel // PAGE) if numel > PAGE else 0


def write(indices: Tensor, numel: int, counts: Tensor, entries: Tensor) -> None:
    """`indices`: int64, in ascending order."""
    entries.copy_(indices % PAGE if counts.numel() else indices)
    if counts.numel():
        starts = torch.arange(0, numel, PAGE, device=indices.device)
        firsts = torch.searchsorted(indices, starts)
        counts.copy_(torch.diff(firsts, append=firsts.new_tensor([indices.numel()])))


def read(counts: Tensor, entries: Tensor, numel: int) -> Tensor:
    indices = entries.to(torch.int64)
    if counts.numel():
        if not counts.is_cuda and (counts.min() < 0 or counts.sum() != entries.numel()):
            raise OffbeatError("a packet's counts and indices do not fit each other")
        starts = torch.arange(0, numel, PAGE, device=entries.device)
        indices += starts.repeat_interleave(counts.to(torch.int64), output_size=entries.numel())
    if not indices.is_cuda and indices.numel() and indices.max() >= numel:
        raise OffbeatError(f"a packet has an index beyond the {numel} entries of its tensor")
    return indices
