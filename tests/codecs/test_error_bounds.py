"""Codecs: how far off what a packet decodes to may be: the bounds that the docstrings state."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offbeat import BFloat16, Codec, ErrorFeedback, Half, PowerSGD, Quantize, RandomK, TopK
from offbeat.codecs.topk import sampled_topk
from offbeat.core.blocks import Matrix
from offbeat.core.port import Lane
from tests.support.coding import averaged, draw, passed, square

pytestmark = pytest.mark.usefixtures("one_thread")

quick = settings(max_examples=25, deadline=None)
few = settings(max_examples=6, deadline=None)

SHAPES = ["normal", "sparse", "ties", "heavy", "tiny", "zero"]
tensors = st.builds(draw, st.integers(0, 10**6), st.integers(1, 3000), st.sampled_from(SHAPES))
large = st.builds(draw, st.integers(0, 10**6), st.integers(65_000, 140_000), st.sampled_from(SHAPES))


@given(st.one_of(tensors, large), st.sampled_from([0.003, 0.1, 0.5, 0.9, 1.0]))
@quick
def test_topk_sends_the_largest(x: Tensor, ratio: float) -> None:
    count = max(1, round(ratio * x.numel()))
    ordered = x.double().square().sort().values
    lost = ordered[: x.numel() - count].sum().item()
    for made in (TopK(ratio), TopK(ratio, sampled=False)):
        decoded = passed(made, x)
        kept = decoded != 0
        assert torch.equal(decoded[kept], x[kept])
        assert kept.sum() <= count
        assert square(x - decoded) == pytest.approx(lost, rel=1e-9)
        assert square(x - decoded) <= (1 - count / x.numel()) * square(x) * (1 + 1e-9)


@given(large, st.integers(1, 500))
@few
def test_a_sampled_threshold_finds_no_other_entries(x: Tensor, count: int) -> None:
    found = sampled_topk(x, count)
    assert torch.equal(found, found.unique())
    assert found.numel() == min(count, int((x != 0).sum()))
    assert torch.equal(x[found].abs().sort(descending=True).values, x.abs().topk(found.numel()).values)


@given(tensors, st.sampled_from([0.003, 0.1, 0.5, 1.0]), st.integers(0, 50))
@quick
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


def chunks(x: Tensor, bits: int) -> tuple[Tensor, ...]:
    return x.split({8: 1024, 4: 128, 1: 1024}[bits])


@given(st.one_of(tensors, large), st.sampled_from([8, 4]), st.booleans())
@quick
def test_quantized_entries_are_off_by_half_a_step(x: Tensor, bits: int, stochastic: bool) -> None:
    levels = {8: 127, 4: 7}[bits]
    made = Quantize(bits, stochastic=stochastic)
    for before, after in zip(chunks(x, bits), chunks(passed(made, x), bits), strict=True):
        step = before.abs().max().item() / levels
        off = (before - after).abs().max().item()
        # float32 rounds a step, and twice what is divided by it: by 2⁻²³ · 2 levels of a step
        assert off <= step * ((1.0 if stochastic else 0.5) + 2e-4) or step < 2**-126
        assert off <= before.abs().max().item() * (1 + 1e-6)


@pytest.mark.parametrize("bits", [8, 4])
def test_steps_too_small_for_a_float_count_as_none(bits: int) -> None:
    """A step of one and a half of the smallest float would be rounded to one."""
    levels = {8: 127, 4: 7}[bits]
    x = torch.full((5,), round(1.49 * levels) * 2.0**-149)
    assert not passed(Quantize(bits), x).any()


@given(st.one_of(tensors, large))
@quick
def test_one_bit_is_the_sign_and_the_mean(x: Tensor) -> None:
    for before, after in zip(chunks(x, 1), chunks(passed(Quantize(1), x), 1), strict=True):
        size = before.double().abs().mean().item()
        assert (after.abs().double() - size).abs().max() <= 1e-5 * size + 1e-44
        assert ((after >= 0) == (before >= 0)).logical_or(before == 0).all()
        lost = square(before) - before.double().abs().sum().item() ** 2 / before.numel()
        assert square(before.double() - after.double()) == pytest.approx(
            lost, rel=1e-4, abs=1e-5 * square(before)
        )


@pytest.mark.parametrize("bits", [8, 4, 1])
def test_stochastic_rounding_is_right_on_average(bits: int) -> None:
    x = draw(1, 300, "normal")
    made = Quantize(bits, stochastic=True)
    memory, times, mean = made.init(x), 1500, torch.zeros(300)
    for _ in range(times):
        mean += passed(made, x, memory) / times
    top = torch.cat([c.abs().max().expand(len(c)) for c in chunks(x, bits)])
    step = top * {8: 1 / 127, 4: 1 / 7, 1: 2.0}[bits]
    assert ((mean - x).abs() <= 5 * step / 2 / times**0.5).all()
    assert not torch.equal(passed(made, x, memory), passed(made, x, memory)), "drawn anew"


@given(tensors)
@quick
def test_half_precision(x: Tensor) -> None:
    off = (x - passed(Half(), x)).abs()
    assert (off <= torch.clamp(x.abs() * 2**-11, min=2**-25))[x.abs() <= 65504].all()
    assert (passed(Half(), x * 1e6)[x.abs() > 1].abs() == 65504).all()
    assert ((x - passed(BFloat16(), x)).abs() <= torch.clamp(x.abs() * 2**-8, min=2**-134)).all()


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 40), st.integers(1, 5))
@quick
def test_powersgd_projects(seed: int, rows: int, cols: int, rank: int) -> None:
    made = PowerSGD(rank)
    x = draw(seed, rows * cols, "normal")
    mean = averaged(made, made.stream(x, [Matrix(0, rows, cols)]), x.clone())
    assert square(mean) <= square(x) * 1.0001
    assert square(x - mean) <= square(x) * 1.0001
    assert square(x - mean) == pytest.approx(square(x) - square(mean), abs=1e-4 * square(x))
    if not made.columns(Matrix(0, rows, cols)):
        assert torch.equal(mean, x)


@given(st.integers(0, 10**6), st.integers(1, 4))
@quick
def test_powersgd_sends_low_rank_matrices_whole(seed: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    low = torch.randn(30, rank, generator=generator) @ torch.randn(rank, 50, generator=generator)
    x = torch.cat([low.flatten(), torch.randn(20, generator=generator)])
    matrices = [Matrix(0, 30, 50), Matrix(1500, 20, 1)]
    mean = averaged(PowerSGD(4), PowerSGD(4).stream(x, matrices), x.clone())
    torch.testing.assert_close(mean, x, rtol=1e-4, atol=1e-4 * x.abs().max().item())
    assert torch.equal(mean[1500:], x[1500:])


def test_powersgd_recovers_from_nothing_and_from_what_is_not_finite() -> None:
    x = draw(0, 600, "normal")
    wire = PowerSGD(2).stream(x, [Matrix(0, 20, 30)])
    assert not averaged(PowerSGD(2), wire, torch.zeros(600)).any()
    assert averaged(PowerSGD(2), wire, torch.full((600,), torch.inf)).isnan().any()
    for _ in range(30):  # power iterations on one matrix find its two largest directions
        mean = averaged(PowerSGD(2), wire, x.clone())
    u, s, v = torch.linalg.svd(x.view(20, 30), full_matrices=False)
    torch.testing.assert_close(mean.view(20, 30), u[:, :2] * s[:2] @ v[:2], rtol=0, atol=0.05)


@pytest.mark.parametrize("made", [TopK(0.1), Half(), PowerSGD(2)], ids=str)
def test_a_wire_keeps_to_its_lane(made: Codec) -> None:
    for coded in (made, ErrorFeedback(made)):
        averaged(
            coded, coded.stream(torch.empty(1200), [Matrix(0, 30, 40)], Lane.BACK), draw(0, 1200, "normal")
        )
