"""Oscars' planner: how many local steps each worker gets; and its settings."""

from __future__ import annotations

import math
from typing import Any

import pytest

from offbeat import Oscars, SettingError
from offbeat.planning import Pace, plan


def steps_of(*step_s: float, tau: int = 4, quantile: float = 0.9, limit: float = 4.0) -> list[int]:
    paces = {worker: Pace(seconds, 0.0) for worker, seconds in enumerate(step_s)}
    return list(plan(paces, range(len(step_s)), tau, quantile, limit).steps.values())


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
    paces = {0: Pace(1.0, 0.5), 1: Pace(1.0, 2.6), 2: Pace(2.0, 0.5), 3: Pace(1.0, 30.0)}
    ours = plan(paces, range(5), 4, 0.9, 4.0)
    assert dict(ours.steps) == {0: 8, 1: 6, 2: 4, 3: 1}, "worker 4 has not been timed"
    assert ours.length_s == 8.5
    assert plan(paces, [4], 4, 0.9, 4.0).length_s == 0


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
    assert Oscars(schedule=schedule).tau_at(8.0, loss) == tau


# --- settings


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ({"tau": 0}, "tau=0: a whole number, at least 1"),
        ({"tau": 2.5}, "tau=2.5"),
        ({"tau": True}, "tau=True"),
        ({"lateness": -1}, "lateness=-1: a whole number, at least 0"),
        ({"schedule": "shrink"}, "fixed, lengthen, shorten"),
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
