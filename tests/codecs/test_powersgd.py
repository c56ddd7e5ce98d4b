"""PowerSGD: a projection of each matrix; low-rank matrices and vectors travel whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat import PowerSGD
from offbeat.core.blocks import Matrix
from tests.support.coding import averaged, draw, square


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 40), st.integers(1, 5))
@settings(max_examples=25)
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
@settings(max_examples=25)
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
