"""The benchmark of plans: which candidates are measured, and what counts as their seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.support import tables
from benchmarks.support.parts import Part
from benchmarks.support.tables import Table
from benchmarks.virtual_time import plan
from benchmarks.virtual_time.plan import CASES, COLUMNS, add_rows, seconds_at, select, verdict

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


CASE = CASES[0]
CANDIDATE = {"rank": 1, "candidate": "ssp", "steps": 30.2, "predicted_s": 3.0, "fate": "", "own_s": None}


def test_the_first_choice_is_compared_with_the_fastest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    table = Table("plan", "?", COLUMNS)
    found = {
        "link": "a link",
        "candidates": [
            {**CANDIDATE, "measured_s": 3.3},
            {**CANDIDATE, "rank": 4, "candidate": "bsp", "measured_s": 3.0, "own_s": 2.5},
            {**CANDIDATE, "rank": 9, "candidate": "osp", "measured_s": 1.0, "steps": None},
        ],
    }
    assert add_rows(table, CASE, found) == pytest.approx(1.1)
    assert table.rows[0] == (CASE.name, "1", "ssp", "30", "3.00", "3.30", "2", "1.10", "never")
    assert table.rows[2][3:] == ("–", "3.00", "–", "3", "–", "never"), "did not reach the target"
    assert add_rows(table, CASE, {"error": "host 2\nfailed"}) == float("inf")
    assert table.notes[-1] == f"{CASE.name} failed: host 2 failed"


def test_the_verdict_needs_all_cases() -> None:
    assert (
        verdict([1.0, 1.09], 2) == "within 10% of the fastest measured: 2 of 2 cases. The goal (all) is met."
    )
    assert verdict([1.0, 1.11], 2).endswith("is missed.")
    assert verdict([1.0, float("inf")], 2).endswith("is missed.")
    assert verdict([1.0], 2).endswith("not in this table: 1 of 2. The goal (all) is met so far.")


def test_a_case_is_kept_for_the_same_options_of_the_same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    run = {"most": 2, "steps": 48}
    found = {"code": plan.code_print(), "machine": plan.machine(), "run": run, "candidates": []}
    assert plan.is_kept(found, run)
    assert not plan.is_kept(None, run)
    assert not plan.is_kept({**found, "error": "host 1 failed"}, run)
    assert not plan.is_kept(found, {**run, "steps": 4})
    monkeypatch.setattr(plan, "code_print", lambda: "other code")
    assert not plan.is_kept(found, run)


def test_three_parts_of_the_cases_take_about_as_long() -> None:
    loads = [sum(case.seconds for case in Part(k, 3).of(CASES, lambda case: case.seconds)) for k in (1, 2, 3)]
    assert max(loads) < 1.1 * min(loads)
    assert max(loads) < 1200
