"""Exact selection of the largest entries by the kernels for a GPU, run by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from offbeat import TopK
from offbeat.codecs.cuda import topk as cuda_topk
from offbeat.codecs.index_coding import decode_indices
from offbeat.codecs.topk import split_packet
from tests.support.coding import draw

pytestmark = pytest.mark.usefixtures("few_programs")


NUMEL = 2 * 65_536 + 17  # pages, and a part of one


def selected(x: Tensor, ratio: float) -> Tensor:
    """The indices that were selected."""
    made = TopK(ratio)
    packet = torch.full((made.nbytes(x.numel(), x.dtype),), 0x55, dtype=torch.uint8)
    counts, values, entries = split_packet(packet, x)
    cuda_topk.select(x, counts, values, entries)
    chosen = decode_indices(counts, entries, x.numel())
    assert torch.equal(x[chosen].view(torch.int32), values.view(torch.int32))
    assert torch.equal(chosen, chosen.unique())  # in order, each once
    return chosen


def check_largest(x: Tensor, ratio: float) -> None:
    chosen = selected(x, ratio)
    sizes = x.abs().nan_to_num(nan=torch.inf)
    expected = sizes.topk(max(1, round(ratio * x.numel()))).values
    assert torch.equal(sizes[chosen].sort(descending=True).values, expected)


@pytest.mark.parametrize("shape", ["normal", "sparse", "heavy"])
@pytest.mark.parametrize("ratio", [0.001, 0.05])
def test_the_largest_are_selected(shape: str, ratio: float) -> None:
    check_largest(draw(1, NUMEL, shape), ratio)


def test_of_equals_as_many_are_selected_as_are_needed() -> None:
    x = (draw(2, NUMEL, "normal") * 50).round() / 50
    check_largest(x, 0.01)
    first = selected(x, 0.01)
    least = x[first].abs().min()
    equals = (x.abs() == least).nonzero().view(-1)
    taken = first[x[first].abs() == least]
    assert 0 < taken.numel() < equals.numel()
    assert torch.equal(taken, equals[: taken.numel()])  # the first ones, so always the same


def test_what_is_not_finite_is_the_largest() -> None:
    x = draw(3, NUMEL, "normal")
    x[777], x[70_000] = torch.nan, -torch.inf
    check_largest(x, 0.01)


def test_one_page_may_have_them_all() -> None:
    x = draw(4, NUMEL, "normal")
    x[65_536 : 65_536 + 2500] *= 10
    check_largest(x, 0.01)


@pytest.mark.parametrize("shape", ["zero", "tiny", "ties"])
def test_where_too_many_pass_the_threshold_they_are_sought_among_all(shape: str) -> None:
    check_largest(draw(5, NUMEL, shape), 0.001)


def test_where_too_few_pass_the_threshold_they_are_sought_among_all() -> None:
    x = draw(5, NUMEL, "normal")
    stride = NUMEL // cuda_topk.SAMPLE
    x[::stride] *= 100  # what the sample sees
    check_largest(x, 0.2)


def test_the_last_may_be_far_above_the_threshold() -> None:
    x = 1e-6 * draw(6, NUMEL, "normal")
    x[: NUMEL // 100 + 1] = 1.0  # the last that is wanted is one of these, the threshold far below
    check_largest(x, 0.01)


def test_all_may_be_wanted() -> None:
    check_largest(draw(6, NUMEL, "normal"), 1.0)
