"""The benchmark of plans: which candidates are measured, and what counts as their seconds."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.virtual_time.plan import CASES, seconds_at, select

from offbeat.experiments.planner.plan_file import Ranked


def test_seconds_at_a_step_are_on_the_line_between_evaluations() -> None:
    history = [{"step": 10, "seconds": 1.0}, {"step": 20, "seconds": 4.0}]
    assert seconds_at(5, history) == pytest.approx(0.5), "from the start"
    assert seconds_at(10, history) == pytest.approx(1.0)
    assert seconds_at(15, history) == pytest.approx(2.5)
    assert seconds_at(30, history) == pytest.approx(6.0), "after the end, at its rate"


def test_the_first_of_different_strategies_are_measured_and_bsp() -> None:
    def ranked(strategy: str, seconds: float | None, **settings: Any) -> Ranked:
        return Ranked(strategy=strategy, strategy_settings=settings, seconds_to_target=seconds)

    first, same, other, late = (
        ranked("local_sgd", 1.0, period=4),
        ranked("local_sgd", 1.1, period=8),
        ranked("ssp", 1.2),
        ranked("osp", 1.3),
    )
    bsp, never = ranked("bsp", 1.4), ranked("gssp", None)
    assert select((first, same, other, late, bsp, never), 2) == [(1, first), (3, other), (5, bsp)]
    assert select((bsp, first), 2) == [(1, bsp), (2, first)]


def test_there_are_three_tasks_three_rates_and_a_straggler() -> None:
    assert len(CASES) == len({case.name for case in CASES}) == 18
