"""Quantize: how far off a decoded entry may be, with 8, 4, 2 and 1 bits, rounded or drawn."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offbeat import Quantize, SettingError
from tests.support.coding import draw, large_tensors, passed, square, tensors


def chunks(x: Tensor, bits: int) -> tuple[Tensor, ...]:
    return x.split({8: 1024, 4: 128, 1: 1024}[bits])


@given(st.one_of(tensors, large_tensors), st.sampled_from([8, 4]), st.booleans())
@settings(max_examples=25)
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


@given(st.one_of(tensors, large_tensors))
@settings(max_examples=25)
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


@given(st.one_of(tensors, large_tensors))
@settings(max_examples=25)
def test_two_bits_are_the_nearest_of_four_levels(x: Tensor) -> None:
    for before, after in zip(x.split(1024), passed(Quantize(2), x).split(1024), strict=True):
        near = 0.625 * before.double().abs().mean().item()
        levels = torch.tensor([-3.0, -1.0, 1.0, 3.0], dtype=torch.float64) * near
        best = (before.double()[:, None] - levels).abs().min(1).values
        off = (before.double() - after.double()).abs()
        assert (off <= best + 1e-5 * near + 1e-44).all()
        bound = square(before) - 55 / 64 * before.double().abs().sum().item() ** 2 / before.numel()
        assert square(before.double() - after.double()) <= bound + 1e-5 * square(before) + 1e-80


def test_two_bits_by_hand() -> None:
    """Of 1, 1, −2, 4 the mean magnitude is 2: a is 1.25, and from 2.5 on it is 3.75. Codes 2, 2, 0, 3."""
    made, x = Quantize(2), torch.tensor([1.0, 1.0, -2.0, 4.0])
    assert passed(made, x).tolist() == [1.25, 1.25, -1.25, 3.75]
    packet = torch.empty(made.nbytes(4, x.dtype), dtype=torch.uint8)
    made.encode(made.init(x), x, packet)
    assert packet[:4].view(torch.float32).item() == 1.25
    assert packet[4:].tolist() == [2 + 4 * 2 + 16 * 0 + 64 * 3]


def test_two_bits_are_not_drawn() -> None:
    with pytest.raises(SettingError, match="2 bits"):
        Quantize(2, stochastic=True)
