"""Casts: how far off an entry of half precision or bfloat16 may be."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from torch import Tensor

from offbeat import BFloat16, Half
from tests.support.coding import passed, tensors


@given(tensors)
@settings(max_examples=25)
def test_half_precision(x: Tensor) -> None:
    off = (x - passed(Half(), x)).abs()
    assert (off <= torch.clamp(x.abs() * 2**-11, min=2**-25))[x.abs() <= 65504].all()
    assert (passed(Half(), x * 1e6)[x.abs() > 1].abs() == 65504).all()
    assert ((x - passed(BFloat16(), x)).abs() <= torch.clamp(x.abs() * 2**-8, min=2**-134)).all()
