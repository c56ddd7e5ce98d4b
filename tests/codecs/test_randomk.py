"""RandomK: one entry of each stretch travels; without bias, the mean of many packets is the tensor."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offbeat import RandomK
from tests.support.coding import draw, passed, square, tensors


@given(tensors, st.sampled_from([0.003, 0.1, 0.5, 1.0]), st.integers(0, 50))
@settings(max_examples=25)
def test_randomk_sends_one_entry_of_each_stretch(x: Tensor, ratio: float, drawn: int) -> None:
    made = RandomK(ratio)
    memory = made.init(x)
    memory.count = drawn
    count = max(1, round(ratio * x.numel()))
    ones = passed(made, torch.ones_like(x), memory)
    assert ones.sum() == count
    ends = [i * x.numel() // count for i in range(count + 1)]
    assert all(ones[a:b].sum() == 1 for a, b in pairwise(ends))
    memory.count = drawn
    assert torch.equal(passed(made, x, memory), x * ones)


@pytest.mark.parametrize("ratio", [0.1, 0.3])
def test_randomk_in_expectation(ratio: float) -> None:
    x = draw(0, 400, "normal")
    made, fair = RandomK(ratio), RandomK(ratio, unbiased=True)
    memory, other = made.init(x), fair.init(x)
    lost, mean, times = 0.0, torch.zeros_like(x), 1500
    for _ in range(times):
        lost += square(x - passed(made, x, memory)) / times
        mean += passed(fair, x, other) / times
    width = -(-400 // round(ratio * 400))
    assert lost <= (1 - 1 / width) * square(x) * 1.02
    assert lost >= (1 - 1 / (width - 1)) * square(x) * 0.98
    # each entry of the mean has a deviation of |x|·sqrt((width − 1) / times)
    assert ((mean - x).abs() <= 5 * x.abs() * (width / times) ** 0.5).all()
