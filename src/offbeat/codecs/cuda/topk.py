"""Exact top-k selection on a GPU: one pass over all entries, then some passes over few candidates.

A sample gives a threshold that slightly more than k entries pass. Among those candidates the k-th largest
magnitude is found, and the packet is filled. Where too few entries pass the threshold, or too many of one
magnitude, the same kernels search all entries instead. Only the GPU knows which case it was: the host never
waits. The kernels are in `topk_kernels.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from offbeat.codecs.index_coding import PAGE

SAMPLE = 1 << 14  # entries from which the threshold is estimated
MARGIN = 1.05  # this many times k entries pass the threshold, and three sigma more
CAPACITY = 1.5  # candidates that fit, as a multiple of those expected
MARKED = 128  # words of 32 entries that a program of `mark` handles
COLLECTED = 256  # words that a program of `collect` handles
COUNTED = 2048  # entries per round of a program of `count_digits`
COUNTERS = 528  # programs of `count_digits`
LEVELS = 4  # digits of eight bits in a magnitude
SELECTED = 512  # candidates per round of a program of `count_selected` and `fill`


def select(entries: Tensor, counts: Tensor, values: Tensor, places: Tensor) -> None:
    """Write the entries of the largest magnitude, and their indices by page, into the parts of a packet."""
    numel, count, pages, device = entries.numel(), values.numel(), counts.numel(), entries.device
    stride = max(1, numel // SAMPLE)
    sampled = min(SAMPLE, numel // stride)
    wanted = MARGIN * count / numel * sampled
    rank = min(int(wanted + 3 * wanted**0.5) + 1, sampled)
    capacity = min(numel, int(CAPACITY * rank * numel / sampled))
    state = torch.zeros(2 + 2 + LEVELS * 256, dtype=torch.int32, device=device)
    bounds, found, tallies = state.split([2, 2, LEVELS * 256])
    _kernel("estimate_threshold")[(1,)](entries, bounds, stride, sampled, rank, SAMPLE=SAMPLE, num_warps=16)
    words = torch.empty(pages * PAGE // 32, dtype=torch.int32, device=device)
    passed_counts = torch.empty(words.numel() // MARKED, dtype=torch.int32, device=device)
    _kernel("mark")[(passed_counts.numel(),)](entries, bounds, words, passed_counts, numel, WORDS=MARKED)
    ends = passed_counts.cumsum(0, dtype=torch.int32)
    collected = torch.empty(capacity, device=device)
    offsets = torch.empty(capacity, dtype=torch.uint16, device=device)
    to_collect = {"WORDS": COLLECTED, "MARKED": MARKED, "PAGE": PAGE, "num_warps": 1}
    _kernel("collect")[(words.numel() // COLLECTED,)](
        entries, words, ends, bounds, collected, offsets, capacity, **to_collect
    )
    search = (entries, numel, collected, capacity, ends, ends.numel(), bounds, count)
    by_page = {"PAGE": PAGE, "PARTS": PAGE // 32 // MARKED, "BLOCK": SELECTED}
    for level in range(LEVELS):
        _kernel("count_digits")[(COUNTERS,)](*search, tallies, LEVEL=level, BLOCK=COUNTED)
    selected = torch.empty(pages, dtype=torch.int64, device=device)
    _kernel("count_selected")[(pages,)](*search, tallies, found, selected, LEVELS=LEVELS, **by_page)
    packet = (selected.cumsum(0), counts, values, places)
    _kernel("fill")[(pages,)](*search, offsets, found, *packet, **by_page)


def _kernel(name: str) -> Any:
    from offbeat.codecs.cuda import topk_kernels  # here, since it needs Triton

    return getattr(topk_kernels, name)
