"""The race: intervals of paired seeds by hand and by trial, and who leads."""

from __future__ import annotations

import math
import random

import pytest

from offbeat.experiments.planner.race import MOST_SEEDS, SAME, T_975, compare, find_leader


def probability_within(t: float, degrees: int) -> float:
    """Integrate the density of Student's t from −t to t, by Simpson's rule."""
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2))
    scale /= math.sqrt(degrees * math.pi)
    parts = 2000
    density = [(1 + (t * k / parts) ** 2 / degrees) ** (-(degrees + 1) / 2) for k in range(parts + 1)]
    total = density[0] + density[-1] + 4 * sum(density[1:-1:2]) + 2 * sum(density[2:-1:2])
    return 2 * scale * total * t / parts / 3


def test_the_quantiles_are_those_of_students_t() -> None:
    assert len(T_975) == MOST_SEEDS - 1
    for degrees, t in enumerate(T_975, 1):
        assert probability_within(t, degrees) == pytest.approx(0.95, abs=1e-5)


def test_an_interval_by_hand() -> None:
    how = compare([2.0, 8.0], [1.0, 2.0])  # ratios 2 and 4: logarithms ln 2 and 2 ln 2
    assert how.ratio == pytest.approx(2**1.5)
    half = 12.7062 * (math.log(2) / math.sqrt(2)) / math.sqrt(2)
    assert how.high / how.ratio == pytest.approx(math.exp(half))
    assert how.ratio / how.low == pytest.approx(math.exp(half))
    assert how.open, "two seeds say little"


def test_what_seeds_share_cancels() -> None:
    leader = [1.0, 30.0, 7.0]
    how = compare([1.1 * seconds for seconds in leader], leader)
    assert how.apart
    assert (how.low, how.high) == (pytest.approx(1.1), pytest.approx(1.1))
    assert compare([1.01 * seconds for seconds in leader], leader).apart
    assert compare(leader, leader).equal
    nearly = compare([1.002, 30.0, 6.99], leader)
    assert nearly.equal and nearly.low > 1 - SAME and nearly.high < 1 + SAME
    assert compare([1.0, 33.0, 6.3], leader).open


def test_one_seed_leaves_half_as_much_again_open() -> None:
    assert compare([1.49], [1.0]).open
    assert compare([1.51], [1.0]).apart
    assert compare([1.0, 9.0], [1.0]).seeds == 1, "over the seeds that both have"


def test_of_two_that_are_alike_one_is_seldom_called_slower() -> None:
    """One-sided, so 2.5% of races; the interval covers the ratio in 95% of them."""
    draw = random.Random(1)

    def seconds() -> list[float]:
        return [draw.lognormvariate(0.0, 0.2) for _ in range(5)]

    races = [compare(seconds(), seconds()) for _ in range(4000)]
    assert sum(how.apart for how in races) / 4000 == pytest.approx(0.025, abs=0.01)
    assert sum(how.low <= 1 <= how.high for how in races) / 4000 == pytest.approx(0.95, abs=0.015)


def test_the_leader_has_the_most_seeds_and_the_least_seconds() -> None:
    assert find_leader([[3.0, 3.0], [1.0], [2.0, 4.0], []]) == 2, "the geometric mean of 2 and 4 is below 3"
    assert find_leader([[], []]) is None
    assert find_leader([[1.0], [1.0]]) == 0, "of equals the earlier one"
