"""The entries of the largest magnitude on a GPU, exactly, by one pass over memory and some over a few.

A threshold by sample lets somewhat more pass than are wanted; among those the last that is wanted is found,
and the packet filled. Where the threshold was unlucky, or too many are of one magnitude, the same kernels
look among all entries instead. Only the GPU knows which it was: the host never waits. The kernels are in
`triton_selection.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from offbeat.codecs.index_coding import PAGE

SAMPLE = 1 << 14  # entries by which a threshold is guessed
MARGIN = 1.05  # more than are wanted are to pass it, by this and three sigma
ROOM = 1.5  # for so many times those that should
MARKED = 128  # words of 32 entries that a program marks
COLLECTED = 256  # and collects from
COUNTED = 2048  # entries of which it counts digits, all programs in turn
COUNTERS = 528
LEVELS = 4  # digits of eight bits in a magnitude
WEIGHED = 512  # entries that it weighs, of those collected


def select(entries: Tensor, counts: Tensor, values: Tensor, places: Tensor) -> None:
    """Put the entries of the largest magnitude into the parts of a packet."""
    numel, count, pages, device = entries.numel(), values.numel(), counts.numel(), entries.device
    stride = max(1, numel // SAMPLE)
    sampled = min(SAMPLE, numel // stride)
    wanted = MARGIN * count / numel * sampled
    rank = min(int(wanted + 3 * wanted**0.5) + 1, sampled)
    room = min(numel, int(ROOM * rank * numel / sampled))
    state = torch.zeros(2 + 2 + LEVELS * 256, dtype=torch.int32, device=device)
    bounds, found, tallies = state.split([2, 2, LEVELS * 256])
    kernel("guess")[(1,)](entries, bounds, stride, sampled, rank, SAMPLE=SAMPLE, num_warps=16)
    words = torch.empty(pages * PAGE // 32, dtype=torch.int32, device=device)
    founds = torch.empty(words.numel() // MARKED, dtype=torch.int32, device=device)
    kernel("mark")[(founds.numel(),)](entries, bounds, words, founds, numel, WORDS=MARKED)
    ends = founds.cumsum(0, dtype=torch.int32)
    collected = torch.empty(room, device=device)
    offsets = torch.empty(room, dtype=torch.uint16, device=device)
    to_collect = {"WORDS": COLLECTED, "MARKED": MARKED, "PAGE": PAGE, "num_warps": 1}
    kernel("collect")[(words.numel() // COLLECTED,)](
        entries, words, ends, bounds, collected, offsets, room, **to_collect
    )
    among = (entries, numel, collected, room, ends, ends.numel(), bounds, count)
    by_page = {"PAGE": PAGE, "PARTS": PAGE // 32 // MARKED, "BLOCK": WEIGHED}
    for level in range(LEVELS):
        kernel("count_digits")[(COUNTERS,)](*among, tallies, LEVEL=level, BLOCK=COUNTED)
    weights = torch.empty(pages, dtype=torch.int64, device=device)
    kernel("weigh")[(pages,)](*among, tallies, found, weights, LEVELS=LEVELS, **by_page)
    packet = (weights.cumsum(0), counts, values, places)
    kernel("fill")[(pages,)](*among, offsets, found, *packet, **by_page)


def kernel(name: str) -> Any:
    from offbeat.codecs.cuda import topk_kernels as triton_selection  # which needs Triton

    return getattr(triton_selection, name)
