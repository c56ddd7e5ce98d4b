"""Operations of the kernels for a GPU, run by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from offbeat.codecs.cuda import ops
from offbeat.codecs.index_coding import PAGE
from tests.support.coding import draw


def test_error_feedback_adds_and_keeps() -> None:
    x, kept = draw(8, 5000, "normal"), draw(9, 5000, "normal")
    total = x.clone()
    not_finite = ops.add_and_check(total, kept)
    assert torch.equal(total, x + kept)
    assert not_finite == 0
    into = kept.clone()
    ops.copy_if_finite(not_finite, total, into)
    assert torch.equal(into, total)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_not_kept(value: float) -> None:
    x, kept = draw(8, 5000, "normal"), draw(9, 5000, "normal")
    x[4321] = value
    before = kept.clone()
    ops.copy_if_finite(ops.add_and_check(x, kept), x, kept)
    assert torch.equal(kept, before)
    ops.copy_if_finite(torch.zeros(1), x, kept)  # not_finite by somebody else
    x[4321] = before[4321]
    assert torch.equal(kept, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_entries_on_a_cpu_are_left_to_torch(dtype: torch.dtype) -> None:
    assert not ops.supports(torch.zeros(8, dtype=dtype))


def test_casts_are_clamped_and_infinities_stay() -> None:
    x = torch.tensor([1.0, -2.5, 1e6, -1e6, torch.inf, -torch.inf, 2.0**-24])
    halves = torch.empty(7, dtype=torch.float16)
    ops.cast_to_half(x, halves, 65504.0)
    assert halves.tolist() == [1.0, -2.5, 65504.0, -65504.0, torch.inf, -torch.inf, 2.0**-24]


def test_values_are_added_where_pages_and_places_say() -> None:
    """Two entries of the first page, none of the second, one of the third."""
    into = torch.zeros(2 * PAGE + 10)
    counts = torch.tensor([2, 0, 1], dtype=torch.int32)
    places = torch.tensor([5, 7, 9], dtype=torch.int32).to(torch.uint16)
    ops.add_paged(into, counts, torch.tensor([1.0, 2.0, 3.0]), places, PAGE, -2.0)
    found = into.nonzero().view(-1)
    assert found.tolist() == [5, 7, 2 * PAGE + 9]
    assert into[found].tolist() == [-2.0, -4.0, -6.0]
