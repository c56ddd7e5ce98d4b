"""Cuts of flat tensors: every entry in one slice, sizes as even, equal or bounded as promised."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.core.partition import (
    ALIGNMENT_BYTES,
    WHOLE,
    EvenSlice,
    equal_size,
    even_bound,
    even_slices,
    grain_of,
    sizes_at_boundaries,
)

numels, parts, grains = st.integers(0, 500), st.integers(1, 9), st.integers(1, 20)


@given(numels, parts, grains)
def test_even_slices_cover_all_in_order_and_differ_by_one_grain(numel: int, parts: int, grain: int) -> None:
    flat = torch.arange(numel)
    slices = even_slices(flat, parts, grain)
    assert len(slices) == parts
    assert torch.equal(torch.cat(slices), flat)
    bounds = [even_bound(numel, number, parts, grain) for number in range(parts + 1)]
    assert all(bound % grain == 0 or bound == numel for bound in bounds)
    in_grains = [-(-len(part) // grain) for part in slices]
    assert max(in_grains) - min(in_grains) <= 1
    assert in_grains[-1] == max(in_grains), "the last is the largest"


def test_even_slices_by_hand() -> None:
    """7 grains of 3 entries among 3: 2, 2 and 3 grains, the last one cut short."""
    assert [part.tolist() for part in even_slices(torch.arange(20), 3, 3)] == [
        [0, 1, 2, 3, 4, 5],
        [6, 7, 8, 9, 10, 11],
        [12, 13, 14, 15, 16, 17, 18, 19],
    ]


@given(numels, parts, grains)
def test_equal_sizes_are_the_least_multiples_that_reach_the_end(numel: int, parts: int, grain: int) -> None:
    size = equal_size(numel, parts, grain)
    assert size % grain == 0
    assert size * parts >= numel
    assert size == 0 or (size - grain) * parts < numel


@given(st.lists(st.integers(0, 60), min_size=1, max_size=12), parts)
def test_slices_at_boundaries_end_at_those_nearest_to_an_even_cut(sizes: list[int], parts: int) -> None:
    boundaries = [0]
    for size in sizes:
        boundaries.append(boundaries[-1] + size)
    cuts = [0]
    for size in sizes_at_boundaries(boundaries, parts):
        assert size >= 0
        cuts.append(cuts[-1] + size)
    assert cuts[-1] == boundaries[-1]
    for number, cut in enumerate(cuts):
        even = boundaries[-1] * number / parts
        assert cut in boundaries
        assert abs(cut - even) == min(abs(edge - even) for edge in boundaries)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_slices_of_weights_begin_where_memory_is_aligned(dtype: torch.dtype, count: int) -> None:
    grain = ALIGNMENT_BYTES // dtype.itemsize
    assert grain_of(dtype.itemsize) == grain
    flat = torch.arange(10 * grain, dtype=dtype)
    slices = [EvenSlice(number, count).of(flat) for number in range(count)]
    assert torch.equal(torch.cat(slices), flat)
    for piece in slices:
        assert (piece.data_ptr() - flat.data_ptr()) % ALIGNMENT_BYTES == 0
    bounds = [EvenSlice(number, count).bounds(flat.numel(), flat.element_size()) for number in range(count)]
    assert all(stop == start for (_, stop), (start, _) in pairwise(bounds))


def test_the_whole_is_one_slice_and_a_view() -> None:
    flat = torch.zeros(5)
    WHOLE.of(flat).fill_(1)
    assert flat.tolist() == [1] * 5
