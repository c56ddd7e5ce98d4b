"""Random numbers by counter: they repeat, and have the distribution that they name."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.worlds.virtual.random_numbers import lognormal, uniform

pytestmark = pytest.mark.virtual


def test_the_random_numbers_are_pinned() -> None:
    assert uniform(0, 0, 0) == 0.13870941014555427
    assert uniform(1, 2, 3) != uniform(1, 3, 2) != uniform(2, 1, 3)


@given(st.integers(0, 2**64 - 1), st.integers(0, 10**6), st.integers(0, 10**9))
def test_uniform_numbers_lie_strictly_inside(seed: int, worker: int, step: int) -> None:
    assert 0.0 < uniform(seed, worker, step) < 1.0


def test_uniform_numbers_are_even() -> None:
    drawn = sorted(uniform(5, worker, step) for worker in range(100) for step in range(100))
    assert max(abs(u - (i + 0.5) / len(drawn)) for i, u in enumerate(drawn)) < 0.02


def test_factors_have_the_median_and_the_deviation_that_they_name() -> None:
    logs = [math.log(lognormal(0.5, 1, worker, step)) for worker in range(20) for step in range(200)]
    assert statistics.median(logs) == pytest.approx(0.0, abs=0.03)
    assert statistics.stdev(logs) == pytest.approx(0.5, rel=0.03)
    assert lognormal(0.0, 1, 2, 3) == 1
