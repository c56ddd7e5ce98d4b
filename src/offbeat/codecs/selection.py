"""The entries of the largest magnitude on a GPU, exactly, by one pass over memory and some over a few.

A threshold by sample lets somewhat more pass than are wanted; among those the last that is wanted is found,
and the packet filled. It is not found where the threshold was unlucky, or where too many are of one
magnitude; torch's selection over all entries then does it. The host waits once, in the end, to know. The
kernels are in `triton_selection.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from offbeat.codecs.indices import PAGE

SAMPLE = 1 << 14  # entries by which a threshold is guessed
MARGIN = 1.05  # more than are wanted are to pass it, by this and three sigma
ROOM = 1.5  # for so many times those that should
MARKED = 128  # words of 32 entries that a program marks at once
COLLECTED = 512  # and collects from
COUNTED = 2048  # entries of which it counts digits, all programs in turn
COUNTERS = 1056
WEIGHED = 512  # entries that it weighs, of those collected


def select(entries: Tensor, counts: Tensor, values: Tensor, places: Tensor) -> bool:
    """Put the entries of the largest magnitude into the parts of a packet; whether they were found."""
    numel, count, device = entries.numel(), values.numel(), entries.device
    stride = max(1, numel // SAMPLE)
    sampled = min(SAMPLE, numel // stride)
    wanted = MARGIN * count / numel * sampled
    rank = int(wanted + 3 * wanted**0.5) + 1
    room = int(ROOM * rank * numel / sampled)
    if room >= numel:
        return False
    pages = counts.numel()
    state = torch.zeros(4 + 3 * 256 + pages, dtype=torch.int32, device=device)
    threshold, found, tallies, founds = state.split([1, 3, 3 * 256, pages])
    kernel("guess")[(1,)](entries, threshold, stride, sampled, rank, SAMPLE=SAMPLE, num_warps=16)
    words = torch.empty(pages * PAGE // 32, dtype=torch.int32, device=device)
    kernel("mark")[(words.numel() // MARKED,)](
        entries, threshold, words, founds, numel, WORDS=MARKED, PAGE=PAGE
    )
    ends = founds.cumsum(0, dtype=torch.int32)
    collected = torch.empty(room, device=device)
    offsets = torch.empty(room, dtype=torch.uint16, device=device)
    kernel("collect")[(pages,)](
        entries, words, ends, collected, offsets, room, WORDS=COLLECTED, PAGE=PAGE, num_warps=2
    )
    for level in range(3):
        kernel("count_digits")[(COUNTERS,)](
            collected, threshold, ends[-1:], tallies, room, count, LEVEL=level, BLOCK=COUNTED
        )
    weights = torch.empty(pages, dtype=torch.int64, device=device)
    kernel("weigh")[(pages,)](collected, threshold, ends, tallies, room, count, found, weights, BLOCK=WEIGHED)
    packet = (weights.cumsum(0), counts, values, places)
    kernel("fill")[(pages,)](collected, offsets, threshold, ends, room, found, *packet, count, BLOCK=WEIGHED)
    return count <= int(found[2]) <= room


def kernel(name: str) -> Any:
    from offbeat.codecs import triton_selection  # which needs Triton

    return getattr(triton_selection, name)
