"""Step times: numbers that repeat, and distributions with the shape that they name."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.worlds.virtual.step_times import (
    Exponential,
    Lognormal,
    Measured,
    Normal,
    StepTime,
    Stragglers,
    Trace,
    uniform,
    usual_seconds,
)
from tests.support.virtual_runs import cluster_of

pytestmark = pytest.mark.virtual


def draws(step_s: StepTime, n: int = 4000) -> list[float]:
    cluster = cluster_of(step_s)
    return [cluster.step_seconds(0, step, 0.0, 7) for step in range(n)]


def test_the_random_numbers_are_pinned() -> None:
    assert uniform(0, 0, 0) == 0.13870941014555427
    assert uniform(1, 2, 3) != uniform(1, 3, 2) != uniform(2, 1, 3)


@given(st.integers(0, 2**64 - 1), st.integers(0, 10**6), st.integers(0, 10**9))
def test_uniform_numbers_lie_strictly_inside(seed: int, worker: int, step: int) -> None:
    assert 0.0 < uniform(seed, worker, step) < 1.0


def test_uniform_numbers_are_even() -> None:
    drawn = sorted(uniform(5, worker, step) for worker in range(100) for step in range(100))
    assert max(abs(u - (i + 0.5) / len(drawn)) for i, u in enumerate(drawn)) < 0.02


def test_distributions_have_the_shape_they_name() -> None:
    assert set(draws(0.05)) == {0.05}
    lognormal = draws(Lognormal(median_s=0.05, sigma=0.3))
    assert statistics.median(lognormal) == pytest.approx(0.05, rel=0.03)
    assert statistics.stdev(map(math.log, lognormal)) == pytest.approx(0.3, rel=0.05)
    normal = draws(Normal(mean_s=0.05, deviation_s=0.01))
    assert statistics.mean(normal) == pytest.approx(0.05, rel=0.02)
    assert statistics.stdev(normal) == pytest.approx(0.01, rel=0.05)
    cut = draws(Normal(mean_s=0.01, deviation_s=0.05))
    assert 0.0 <= min(cut) < 0.001
    ratio = statistics.NormalDist().pdf(0.2) / statistics.NormalDist().cdf(0.2)
    assert statistics.mean(cut) == pytest.approx(0.01 + 0.05 * ratio, rel=0.05)
    tailed = draws(Exponential(least_s=0.05, tail_s=0.01))
    assert min(tailed) > 0.05
    assert statistics.mean(tailed) == pytest.approx(0.06, rel=0.02)


def test_stragglers_are_as_frequent_as_said() -> None:
    drawn = draws(Stragglers(usual_s=0.05, probability=0.1, factor=5))
    assert set(drawn) == {0.05, 0.25}
    assert drawn.count(0.25) == pytest.approx(400, rel=0.15)


def test_a_trace_repeats_and_a_measurement_is_drawn_from() -> None:
    assert draws(Trace(trace_s=(0.1, 0.2, 0.3)), 7) == [0.1, 0.2, 0.3, 0.1, 0.2, 0.3, 0.1]
    drawn = draws(Measured(measured_s=(0.1, 0.2, 0.3)), 300)
    assert all(drawn.count(seconds) == pytest.approx(100, rel=0.3) for seconds in (0.1, 0.2, 0.3))
    measured = cluster_of(Measured(measured_s=(0.1,), ready=(0.5, 1.0)))
    assert measured.ready_fractions(0) == (0.5, 1.0)
    assert cluster_of(0.1).ready_fractions(0) == ()


@pytest.mark.parametrize(
    "step_s",
    [
        0.1,
        Lognormal(median_s=0.1, sigma=0.3),
        Normal(mean_s=0.1, deviation_s=0.05),
        Exponential(least_s=0.1, tail_s=0.05),
        Stragglers(usual_s=0.1, probability=0.1, factor=8.0),
        Trace(trace_s=(0.3, 0.1, 0.1)),
    ],
    ids=lambda step_s: type(step_s).__name__,
)
def test_the_usual_seconds_are_the_median_of_many(step_s: StepTime) -> None:
    assert usual_seconds(step_s) == pytest.approx(statistics.median(draws(step_s)), rel=0.02)
