"""The Triton kernels behind the selection of the largest entries, one by one, run by Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from offbeat.codecs.index_coding import PAGE
from tests.support.coding import draw

WORDS = 128  # of 32 entries, in a program of `mark`
NUMEL = 3 * WORDS * 32 - 50


def kernel(name: str) -> Any:
    from offbeat.codecs.cuda import topk_kernels  # here, since it needs Triton

    return getattr(topk_kernels, name)


def magnitude_bits(x: Tensor) -> Tensor:
    return x.view(torch.int32) & 0x7FFFFFFF


@pytest.mark.parametrize("rank", [1, 40, 500])
def test_the_threshold_is_reached_by_at_least_the_rank_and_hardly_more(rank: int) -> None:
    x = draw(1, NUMEL, "normal")
    bounds = torch.zeros(2, dtype=torch.int32)
    stride, sampled = 7, 1024
    kernel("estimate_threshold")[(1,)](x, bounds, stride, sampled, rank, SAMPLE=1024)
    sample = magnitude_bits(x[::stride][:sampled].contiguous())
    threshold = int(bounds[0])
    assert int((sample >= threshold).sum()) >= rank
    next_coarse = threshold + (1 << 15)  # the lowest 15 bits are left out
    assert int((sample >= next_coarse).sum()) < rank


def marked(x: Tensor, least: float) -> tuple[Tensor, Tensor, Tensor]:
    bounds = torch.zeros(2, dtype=torch.int32)
    bounds[0] = magnitude_bits(torch.tensor([least]))[0]
    programs = -(-x.numel() // (WORDS * 32))
    words = torch.empty(programs * WORDS, dtype=torch.int32)
    passed = torch.empty(programs, dtype=torch.int32)
    kernel("mark")[(programs,)](x, bounds, words, passed, x.numel(), WORDS=WORDS)
    return bounds, words, passed


def test_marks_are_the_entries_that_reach_the_threshold() -> None:
    x = draw(2, NUMEL, "normal")
    x[-1] = 9.0
    _, words, passed = marked(x, 1.5)
    bits = (words.unsqueeze(1) >> torch.arange(32)) & 1
    expected = x.abs() >= 1.5
    assert torch.equal(bits.flatten()[:NUMEL].bool(), expected)
    assert not bits.flatten()[NUMEL:].any(), "nothing beyond the end"
    padded = torch.nn.functional.pad(expected, (0, words.numel() * 32 - NUMEL))
    assert passed.tolist() == padded.view(-1, WORDS * 32).sum(1).tolist()


def test_marked_entries_are_collected_in_order_with_their_places_and_the_largest_is_found() -> None:
    x = draw(3, NUMEL, "normal")
    bounds, words, passed = marked(x, 2.0)
    ends = passed.cumsum(0, dtype=torch.int32)
    expected = (x.abs() >= 2.0).nonzero().view(-1)
    capacity = expected.numel()
    values, places = torch.empty(capacity), torch.empty(capacity, dtype=torch.uint16)
    kernel("collect")[(words.numel() // WORDS,)](
        x, words, ends, bounds, values, places, capacity, WORDS=WORDS, MARKED=WORDS, PAGE=PAGE
    )
    assert torch.equal(places.to(torch.int64), expected)
    assert torch.equal(values, x[expected])
    assert int(bounds[1]) == int(magnitude_bits(x).max())
