"""The kernels for a GPU, run without one by Triton's interpreter: they do what torch's operations do."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from offbeat import Codec, Half, Quantize, RandomK, TopK
from offbeat.codecs.cuda import ops
from offbeat.codecs.cuda import topk as cuda_topk
from offbeat.codecs.index_coding import decode_indices
from offbeat.codecs.topk import split_packet
from tests.support.coding import draw

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
pytest.importorskip("triton", reason="Triton is not installed: it comes with torch's builds for CUDA")

pytestmark = pytest.mark.usefixtures("one_thread")

NUMEL = 2 * 65_536 + 17  # pages, and a part of one


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs them one after the other, and takes as long for one entry as for thousands."""
    monkeypatch.setattr(cuda_topk, "COUNTERS", 3)
    monkeypatch.setattr(cuda_topk, "COUNTED", 1 << 14)
    monkeypatch.setattr(cuda_topk, "SELECTED", 1 << 13)


@pytest.fixture
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codecs leave all they can to the kernels, as on a GPU."""
    monkeypatch.setattr(
        ops, "supports", lambda entries: entries.dtype == torch.float32 and entries.numel() > 0
    )


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


@pytest.mark.usefixtures("on_kernels")
@pytest.mark.parametrize(
    "made", [Quantize(8), Quantize(4), Quantize(1), Half(), RandomK(0.01), TopK(0.01)], ids=str
)
def test_packets_mean_the_same_to_torch(made: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw(7, 70_001, "heavy")
    by_kernels, sum_by_kernels = encoded(made, x), torch.ones_like(x)
    made.accumulate(by_kernels, sum_by_kernels, -0.5)
    monkeypatch.setattr(ops, "supports", lambda entries: False)
    by_torch, sum_by_torch = encoded(made, x), torch.ones_like(x)
    if made != Quantize(1):  # whose scales are means, added up in another order
        assert torch.equal(by_kernels, by_torch)
    made.accumulate(by_kernels, sum_by_torch, -0.5)
    assert torch.equal(sum_by_kernels, sum_by_torch)
    decoded = [torch.empty_like(x), torch.empty_like(x)]
    for packet, into in zip((by_kernels, by_torch), decoded, strict=True):
        made.decode(packet, into)
    torch.testing.assert_close(*decoded, rtol=1e-6, atol=0)


def encoded(made: Codec, x: Tensor) -> Tensor:
    packet = torch.empty(made.nbytes(x.numel(), x.dtype), dtype=torch.uint8)
    made.encode(made.init(x), x.clone(), packet)
    return packet


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
