"""Workers of like speed are found, from noisy times; and noise does not move them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.strategies.gssp.clustering import MARGIN, Groups, cluster_by_speed, recluster

LIKENESS = 1.25
noise = st.floats(0.95, 1.05)  # of one worker's median time: two that are alike differ by 1.11 at most


@st.composite
def clusters(draw: st.DrawFn, apart: float = 1.45) -> tuple[Groups, dict[int, float], list[float]]:
    """True groups of 1 to 4 speeds, so far apart; the true seconds of each worker, and of each group."""
    speeds = [draw(st.floats(1e-3, 10.0))]
    for _ in range(draw(st.integers(0, 3))):
        speeds.append(speeds[-1] * draw(st.floats(apart, 8.0)))
    of = draw(st.lists(st.integers(0, len(speeds) - 1), min_size=1, max_size=24))
    truth = [[worker for worker, speed in enumerate(of) if speed == k] for k in range(len(speeds))]
    seconds = {worker: speeds[k] for worker, k in enumerate(of)}
    return [group for group in truth if group], seconds, speeds


@settings(deadline=None, max_examples=300)
@given(clusters(), st.data())
def test_noisy_times_of_speeds_that_are_well_apart_give_the_true_groups(
    cluster: tuple[Groups, dict[int, float], list[float]], data: st.DataObject
) -> None:
    truth, seconds, _ = cluster
    noisy = {worker: s * data.draw(noise) for worker, s in seconds.items()}
    assert cluster_by_speed(noisy, LIKENESS) == truth


times = st.dictionaries(st.integers(0, 99), st.floats(1e-3, 10.0), min_size=1, max_size=20)


def span(group: list[int], seconds: dict[int, float]) -> float:
    return max(seconds[w] for w in group) / min(seconds[w] for w in group)


@settings(deadline=None, max_examples=300)
@given(times, st.floats(1.0, 3.0))
def test_groups_of_any_times_are_narrow_apart_and_in_order(
    seconds: dict[int, float], likeness: float
) -> None:
    groups = cluster_by_speed(seconds, likeness)
    assert sorted(w for group in groups for w in group) == sorted(seconds)
    assert all(group == sorted(group) and span(group, seconds) <= likeness for group in groups)
    for one, other in pairwise(groups):
        assert max(seconds[w] for w in one) <= min(seconds[w] for w in other)
        assert span([*one, *other], seconds) > likeness


@settings(deadline=None, max_examples=300)
@given(times, st.data())
def test_no_groups_flap_by_noise(seconds: dict[int, float], data: st.DataObject) -> None:
    """Whatever the groups are, a spectrum without gaps, too."""
    groups = cluster_by_speed(seconds, LIKENESS)
    still = st.floats(MARGIN**-0.4999, MARGIN**0.4999)
    for _ in range(3):
        noisy = {worker: s * data.draw(still) for worker, s in seconds.items()}
        assert sorted(recluster(groups, noisy, LIKENESS)) == sorted(groups)


@settings(deadline=None, max_examples=200)
@given(clusters(apart=1.001 * LIKENESS * MARGIN * 1.05 / 0.95), st.data())  # more than: not at the edge
def test_one_whose_speed_has_changed_moves_and_the_others_stay(
    cluster: tuple[Groups, dict[int, float], list[float]], data: st.DataObject
) -> None:
    truth, seconds, speeds = cluster
    mover = data.draw(st.sampled_from(sorted(seconds)))
    new = data.draw(st.sampled_from(speeds))
    noisy = {worker: (new if worker == mover else s) * data.draw(noise) for worker, s in seconds.items()}
    expected = cluster_by_speed(
        {worker: new if worker == mover else s for worker, s in seconds.items()}, LIKENESS
    )
    assert recluster(truth, noisy, LIKENESS) == expected


@pytest.mark.parametrize(
    ("seconds", "groups"),
    [
        ({0: 0.1, 1: 0.1, 2: 0.2, 3: 0.4}, [[0, 1], [2], [3]]),
        ({3: 0.1, 2: 0.4, 1: 0.1, 0: 0.4}, [[1, 3], [0, 2]]),
        ({0: 0.0, 1: 0.0}, [[0, 1]]),
        ({7: 1.0}, [[7]]),
        ({0: 1.0, 1: 1.25}, [[0, 1]]),
        ({}, []),
    ],
)
def test_groups_by_hand(seconds: dict[int, float], groups: Groups) -> None:
    assert cluster_by_speed(seconds, LIKENESS) == groups


def test_who_left_and_who_came_make_no_difference_to_the_others() -> None:
    seconds = {0: 1.0, 1: 1.0, 2: 4.0}
    assert recluster([[0, 1], [2, 3]], seconds, LIKENESS) == [[0, 1], [2]]
    assert recluster([[0, 1, 3], [2]], {**seconds, 3: 4.2}, LIKENESS) == [[0, 1], [2, 3]]
