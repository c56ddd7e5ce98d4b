"""Step times: distributions with the shape that they name, which repeat."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from itertools import pairwise

import pytest

from offbeat.worlds.virtual.cluster import Cluster
from offbeat.worlds.virtual.step_times import (
    Exponential,
    Kinds,
    Lognormal,
    Markov,
    Measured,
    Normal,
    StepTime,
    Stragglers,
    Trace,
    usual_seconds,
)
from tests.support.virtual_runs import cluster_of

pytestmark = pytest.mark.virtual


def draws(step_s: StepTime, n: int = 4000) -> list[float]:
    cluster = cluster_of(step_s)
    return [cluster.step_seconds(0, step, 0.0, 7) for step in range(n)]


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


# --- a trace of a group


def of_group(step_s: StepTime, rank: int, steps: int, seed: int = 7, count: int = 8) -> list[float]:
    group = replace(cluster_of(step_s).workers[0], count=count)
    cluster = Cluster(workers=(group,))
    return [cluster.step_seconds(rank, step, 0.0, seed) for step in range(steps)]


def test_workers_of_a_group_are_at_different_places_of_its_trace() -> None:
    seconds = tuple(0.001 * (n + 1) for n in range(50))
    traces = [of_group(Trace(trace_s=seconds), rank, 100) for rank in range(8)]
    starts = [trace[0] for trace in traces]
    assert starts[0] == seconds[0], "the first starts at the beginning"
    assert len(set(starts)) > 5
    for trace, start in zip(traces, map(seconds.index, starts), strict=True):
        assert trace == [seconds[(start + n) % 50] for n in range(100)], "from there on, the same order"
    again = [of_group(Trace(trace_s=seconds), rank, 1)[0] for rank in range(8)]
    other = [of_group(Trace(trace_s=seconds), rank, 1, seed=8)[0] for rank in range(8)]
    assert again == starts != other


# --- slow for some steps in a row


def spells(slow: list[bool]) -> list[int]:
    """The lengths of all spells that are slow and have ended."""
    text = "".join("x" if each else "." for each in slow[: len(slow) - slow[::-1].index(False)])
    return [len(part) for part in text.split(".") if part]


def chain(slows: float, recovers: float, steps: int = 40_000, rank: int = 0) -> list[bool]:
    markov = Markov(usual_s=1.0, factor=3.0, slows=slows, recovers=recovers)
    return [seconds == 3.0 for seconds in of_group(markov, rank, steps)]


def test_a_chain_is_slow_as_often_and_as_long_as_its_probabilities_say() -> None:
    slow = chain(0.02, 0.1)
    assert statistics.mean(slow) == pytest.approx(0.02 / 0.12, rel=0.05)
    assert statistics.mean(spells(slow)) == pytest.approx(1 / 0.1, rel=0.05)
    assert statistics.mean(n == 1 for n in spells(slow)) == pytest.approx(0.1, rel=0.25)


def test_a_chain_that_always_changes_alternates() -> None:
    slow = chain(1.0, 1.0, 50)
    assert slow == [slow[0] ^ (n % 2 == 1) for n in range(50)]
    rare = chain(1e-9, 1.0, 2000)
    assert not any(rare)


def test_steps_of_a_chain_are_independent_where_the_probabilities_add_up_to_one() -> None:
    slow = chain(0.3, 0.7)
    after = [there for here, there in pairwise(slow) if here]
    assert statistics.mean(after) == pytest.approx(0.3, rel=0.05)
    assert statistics.mean(slow) == pytest.approx(0.3, rel=0.05)


def test_a_chain_repeats_in_any_order_of_calls_and_differs_by_worker_and_seed() -> None:
    markov = Markov(usual_s=1.0, factor=3.0, slows=0.1, recovers=0.3)
    cluster = Cluster(workers=(replace(cluster_of(markov).workers[0], count=3),))
    forward = [cluster.step_seconds(1, step, 0.0, 11) for step in range(200)]
    assert [cluster.step_seconds(1, step, 0.0, 11) for step in reversed(range(200))] == forward[::-1]
    assert forward != [cluster.step_seconds(2, step, 0.0, 11) for step in range(200)]
    assert forward != [cluster.step_seconds(1, step, 0.0, 12) for step in range(200)]
    assert usual_seconds(markov) == 1.0


def test_a_worker_has_a_machine_of_one_kind_whatever_the_seed() -> None:
    cluster = cluster_of(*[Kinds(kinds_s=(20.0, 40.0, 40.0), sigma=0.1)] * 300)

    def kind(worker: int, seed: int) -> float:
        logs = [math.log(cluster.step_seconds(worker, step, 0.0, seed)) for step in range(40)]
        assert statistics.stdev(logs) == pytest.approx(0.1, rel=0.5)
        return math.exp(statistics.median(logs))

    kinds = [kind(worker, seed=1) for worker in range(300)]
    fast = sum(seconds < 28 for seconds in kinds) / 300
    assert fast == pytest.approx(1 / 3, abs=0.09), "a kind that is listed twice is so often"
    assert all(min(abs(seconds / each - 1) for each in (20, 40)) < 0.1 for seconds in kinds)
    assert [kind(worker, seed=2) < 28 for worker in range(20)] == [seconds < 28 for seconds in kinds[:20]]
    assert usual_seconds(Kinds(kinds_s=(20.0, 30.0, 70.0), sigma=0.1)) == 30.0
