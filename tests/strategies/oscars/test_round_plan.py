"""Oscars' planner: how many local steps each worker gets; and its settings."""

from __future__ import annotations

import math
from statistics import median_low
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat import Oscars, SettingError
from offbeat.strategies.oscars.round_plan import WorkerPace, plan_round


def steps_of(*step_s: float, tau: int = 4, quantile: float = 0.9, limit: float = 4.0) -> list[int]:
    paces = {worker: WorkerPace(seconds, 0.0) for worker, seconds in enumerate(step_s)}
    return list(plan_round(paces, range(len(step_s)), tau, quantile, limit).steps.values())


def test_all_arrive_together() -> None:
    assert steps_of(0.1, 0.1, 0.2, 0.4) == [16, 16, 8, 4]
    assert steps_of(0.31, 0.75, 1.0) == [13, 5, 4], "as many as fit"
    assert steps_of(0.1, 0.1, 0.1, tau=1) == [1, 1, 1]
    assert steps_of(1.0, 1.05, tau=1) == [1, 1]


def test_a_step_may_end_a_twentieth_of_the_round_late() -> None:
    assert steps_of(1.04, 4.0, tau=1) == [4, 1], "four end 0.16 s after the slow one's"
    assert steps_of(1.06, 4.0, tau=1) == [3, 1], "0.24 s"


def test_nobody_does_more_than_the_limit() -> None:
    assert steps_of(0.01, 1.0, tau=2) == [8, 2]
    assert steps_of(0.01, 1.0, tau=2, limit=1) == [2, 2]
    assert steps_of(0.01, 1.0, tau=3, limit=1.5) == [4, 3]
    assert steps_of(0.01, 1.0, tau=100, limit=0.03) == [3, 3], "so all do the same"


def test_a_straggler_beyond_the_quantile_sets_no_pace() -> None:
    nine = [1.0] * 9
    assert steps_of(*nine, 50.0) == [4] * 9 + [1]
    assert steps_of(*nine, 50.0, quantile=1.0) == [16] * 9 + [4]
    assert steps_of(1.0, 1.0, 1.0, 50.0, quantile=0.75) == [4, 4, 4, 1]


def test_who_takes_longer_to_exchange_computes_less() -> None:
    paces = {
        0: WorkerPace(1.0, 0.5),
        1: WorkerPace(1.0, 2.6),
        2: WorkerPace(2.0, 0.5),
        3: WorkerPace(1.0, 30.0),
    }
    ours = plan_round(paces, range(5), 4, 0.9, 4.0)
    assert dict(ours.steps) == {0: 8, 1: 6, 2: 4, 3: 1}, "worker 4 has not been timed"
    assert ours.length_s == 8.5
    assert plan_round(paces, [4], 4, 0.9, 4.0).length_s == 0


def test_one_who_exchanged_faster_than_the_others_costs_them_no_step() -> None:
    """A worker that pushes alone has the links for itself: 0.05 s, where the others take 0.25 s."""
    paces = {worker: WorkerPace(0.5, 0.25) for worker in range(7)} | {7: WorkerPace(0.5, 0.05)}
    ours = plan_round(paces, range(8), 4, 0.9, 4.0)
    assert set(ours.steps.values()) == {4}
    assert ours.length_s == 2.25


def test_rounds_are_longer_where_an_exchange_takes_long() -> None:
    """Steps of 0.1 and 0.4 s, τ = 4, so 1.6 s of computing; an exchange of 0.6, 1.6, 4.8 s."""
    for exchange_s, busy, slow, fast, length_s in [
        (0.6, 0.5, 4, 16, 2.2),  # long enough as it is
        (1.6, 0.5, 4, 16, 3.2),
        (4.8, 0.0, 4, 16, 6.4),
        (4.8, 0.5, 12, 50, 9.6),  # ⌊1.05 · 4.8/0.4⌋ and ⌊1.05 · 4.8/0.1⌋
        (4.8, 0.25, 4, 16, 6.4),  # 1.6 of 6.4 s
        (4.8, 0.2, 4, 16, 6.4),
        (4.8, 0.75, 37, 151, 19.2),
    ]:
        ours = plan_round(
            {0: WorkerPace(0.1, exchange_s), 1: WorkerPace(0.4, exchange_s)}, range(2), 4, 0.9, 5.0, busy
        )
        assert [ours.steps[1], ours.steps[0]] == [slow, fast], (exchange_s, busy)
        assert ours.length_s == pytest.approx(length_s)


def test_the_limit_is_of_the_longer_round() -> None:
    paces = {0: WorkerPace(0.01, 4.0), 1: WorkerPace(0.4, 4.0)}
    assert dict(plan_round(paces, range(2), 1, 0.9, 2.0, 0.5).steps) == {0: 20, 1: 10}


@given(
    st.lists(st.builds(WorkerPace, st.floats(1e-3, 10), st.floats(0, 100)), min_size=1, max_size=8),
    st.integers(1, 20),
    st.floats(0, 0.9),
)
def test_whoever_exchanges_in_the_time_that_sets_the_pace_is_as_busy_as_told(
    paces: list[WorkerPace], tau: int, busy: float
) -> None:
    """Of a round without slack, and without what whole steps leave over."""
    ours = plan_round(dict(enumerate(paces)), range(len(paces)), tau, 1.0, 1e9, busy)
    exchange_s = max(pace.exchange_s for pace in paces)
    compute_s = ours.length_s - median_low(pace.exchange_s for pace in paces)
    assert compute_s >= busy * (compute_s + exchange_s) * (1 - 1e-9)
    plain = plan_round(dict(enumerate(paces)), range(len(paces)), tau, 1.0, 1e9)
    assert all(ours.steps[worker] >= plain.steps[worker] for worker in plain.steps)
    if compute_s > tau * max(pace.step_s for pace in paces) * (1 + 1e-9):
        assert compute_s <= busy * (compute_s + exchange_s) * (1 + 1e-9), "and no longer than that"


@pytest.mark.parametrize(
    ("schedule", "loss", "tau"),
    [
        ("fixed", 1.0, 4),
        ("lengthen", 8.0, 4),
        ("lengthen", 1.0, 8),
        ("lengthen", 3.0, 6),
        ("lengthen", 64.0, 2),
        ("shorten", 1.0, 2),
        ("shorten", 8.0, 4),
        ("shorten", 3.0, 3),
        ("shorten", 0.001, 1),
        ("lengthen", 0.0, 4),
        ("shorten", -1.0, 4),
    ],
)
def test_tau_follows_the_cube_root_of_the_loss(schedule: str, loss: float, tau: int) -> None:
    """From a loss of 8 and a τ of 4; ⌈(8/3)^(1/3)·4⌉ = ⌈5.55⌉, ⌈(3/8)^(1/3)·4⌉ = ⌈2.88⌉."""
    assert Oscars(schedule=schedule).server_half().rule.settings.tau_at(8.0, loss) == tau


# --- settings


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ({"tau": 0}, "tau=0: a whole number, at least 1"),
        ({"tau": 2.5}, "tau=2.5"),
        ({"tau": True}, "tau=True"),
        ({"lateness": -1}, "lateness=-1: a whole number, 0 or more"),
        ({"schedule": "shrink"}, "fixed, lengthen, shorten"),
        ({"busy": 1}, "busy=1: a number, the fraction of a round, from 0 to below 1"),
        ({"busy": -0.1}, "busy=-0.1"),
        ({"busy": math.nan}, "busy=nan"),
        ({"limit": 0}, "limit=0: a number, times tau, above 0"),
        ({"limit": "4"}, "limit='4'"),
        ({"quantile": 0}, "quantile=0: a number, above 0"),
        ({"quantile": 1.1}, "quantile=1.1"),
        ({"patience": -0.1}, "patience=-0.1"),
        ({"patience": math.inf}, "patience=inf"),
        ({"belief": 0}, "belief=0"),
        ({"belief": math.nan}, "belief=nan"),
    ],
)
def test_bad_settings_are_refused(settings_: Any, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        Oscars(**settings_)
