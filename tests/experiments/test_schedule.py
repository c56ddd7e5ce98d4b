"""Learning rates over a run: closed forms, and what optimizers in both worlds are told."""

from __future__ import annotations

import math

import pytest
import torch

from offbeat import BSP, SSP
from offbeat.experiments.schedule import rate_factor
from tests.support.virtual_runs import Kept, cluster_of, play

TOTAL = 200


def test_constant_rates_stay() -> None:
    assert {rate_factor("constant", step, TOTAL) for step in range(1, TOTAL + 1)} == {1.0}


def test_a_cosine_rises_for_a_twentieth_and_falls_to_nearly_zero() -> None:
    factors = [rate_factor("cosine", step, TOTAL) for step in range(1, TOTAL + 1)]
    assert factors[:10] == pytest.approx([0.1 * k for k in range(1, 11)])
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[104] == pytest.approx(0.5 * (1 + math.cos(math.pi * 95 / 191)))
    assert 0 < factors[-1] < 1e-4


@pytest.mark.virtual
@pytest.mark.parametrize("strategy", [BSP(), SSP(staleness=0)], ids=str)
def test_weights_follow_the_schedule(strategy: BSP | SSP) -> None:
    """w ← w − η_t · a ⊙ w, without noise: each weight ends at a product over the steps."""
    task, steps = Kept(dimension=4, noise=0.0, lr=0.2), 20
    run = play(cluster_of(2), strategy, steps, task=task, schedule="cosine")
    curvatures = torch.linspace(1, 0.1, 4, dtype=torch.float64)
    expected = torch.ones(4, dtype=torch.float64)
    for step in range(1, steps + 1):
        expected *= 1 - 0.2 * rate_factor("cosine", step, steps) * curvatures
    assert torch.allclose(run.weights[0].double(), expected, atol=1e-6)
