"""Checks for numbers that are not finite: none is overlooked, whatever the dtype."""

from __future__ import annotations

import pytest
import torch

from offbeat.core.finite import is_finite, nan_if_not_finite

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
BAD = pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])


@DTYPES
@BAD
def test_one_number_is_enough(dtype: torch.dtype, bad: float) -> None:
    tensor = torch.ones(1000, dtype=dtype)
    assert is_finite([tensor])
    assert nan_if_not_finite(tensor) == 0
    tensor[777] = bad
    assert not is_finite([torch.ones(3), tensor])
    assert nan_if_not_finite(tensor).isnan()


@DTYPES
def test_infinities_of_both_signs_do_not_cancel(dtype: torch.dtype) -> None:
    tensor = torch.tensor([torch.inf, -torch.inf, 1.0], dtype=dtype)
    assert not is_finite([tensor])
    assert nan_if_not_finite(tensor).isnan()


def test_halves_are_added_up_in_a_wider_format() -> None:
    """Their sum, 60,000,000, is far beyond what a half can hold."""
    tensor = torch.full((1000,), 60_000.0, dtype=torch.float16)
    assert is_finite([tensor])
    assert nan_if_not_finite(tensor) == 0


def test_nothing_at_all_is_finite() -> None:
    assert is_finite([])
    assert is_finite([torch.empty(0)])
