"""The benchmark scale: goals are judged in CPU seconds, and its verdict names what misses."""

from __future__ import annotations

from typing import Any

from benchmarks.virtual_time import scale
from benchmarks.virtual_time.scale import PROPORTION, RUNS, Row

from offbeat.strategies import STRATEGIES


def outcome(cpu_s: float) -> dict[str, Any]:
    return {"cpu_s": cpu_s, "took": 9 * cpu_s, "memory": 1e9, "steps": 100, "virtual": 1.0}


def test_every_strategy_has_a_row_of_1000_workers() -> None:
    assert {row.strategy for row in RUNS if (row.workers, row.steps) == (1000, 100)} == set(STRATEGIES.own)
    assert len({row.name for row in RUNS}) == len(RUNS), "a file of its own each"


def test_goals_are_judged_in_cpu_seconds() -> None:
    few, many = (Row("quadratic", "{}", "bsp", n, 100) for n in (1000, 10_000))
    many = many._replace(goals=("< 20 s", PROPORTION))
    found = {few: outcome(1.0), many: outcome(12.0)}
    assert scale.cost_us(many, found) == 12.0
    assert [scale.is_met(goal, many, found) for goal in many.goals] == [True, True]
    assert scale.cells(many, found)[-1] == f"< 20 s: met; {PROPORTION}: met"
    found[many] = outcome(21.0)
    assert [scale.is_met(goal, many, found) for goal in many.goals] == [False, False]
    assert scale.is_met(PROPORTION, many, {many: outcome(1.0)}) is None, "nothing to compare with"
    assert scale.is_met("< 2 GB", few, found)
    assert not scale.is_met("< 10 µs", few, found)


def test_the_verdict_names_what_misses_and_what_was_not_run() -> None:
    found = {row: outcome(0.1) for row in RUNS}
    goals = sum(len(row.goals) for row in RUNS)
    assert scale.verdict(found) == f"{goals} of {goals} goals are met"
    (last,) = RUNS[-1:]
    found[last] = outcome(61.0)
    del found[RUNS[0]]
    assert scale.verdict(found) == (
        f"{goals - 1} of {goals} goals are met; missed: {last.strategy}, quadratic, 1,000 workers (< 60 s); "
        f"not run: 1 of {len(RUNS)} rows"
    )
