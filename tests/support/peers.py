"""Made-up cases and outcomes of the comparison with peers."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.cases import DONE, EQUAL, Case, Evaluation, Outcome
from benchmarks.peers.results import GOAL_TASK


def case(contender: str, **more: Any) -> Case:
    fields = {"task": GOAL_TASK, "rate": "1gbit", "workers": EQUAL, "contender": contender, **more}
    return Case(**fields)


def outcome(contender: str, *points: tuple[float, float], ended: str = DONE, **more: Any) -> Outcome:
    """Return an outcome with evaluations at these seconds and values, 100 steps and a megabyte apart."""
    history = tuple(Evaluation(100 * k, s, v, 1_000_000 * k) for k, (s, v) in enumerate(points, 1))
    return Outcome(case=case(contender, **more), ended=ended, history=history, limit_s=40.0)
