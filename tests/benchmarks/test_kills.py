"""The parts of the benchmark kills that need no hosts."""

from __future__ import annotations

import pytest
from benchmarks.chaos.job import WORKERS
from benchmarks.virtual_time import kills
from benchmarks.virtual_time.kills import FAILURES, SEED, Kills, Schedule, virtual_cluster


@pytest.mark.parametrize("strategy, spared", [("local_sgd", 0), ("ssp", 1)])
def test_workers_die_when_they_die_in_a_plan(strategy: str, spared: int) -> None:
    planned = FAILURES.applied(virtual_cluster(), SEED, 100.0, spared=spared).away
    drawn = Schedule.of(strategy, 100.0).absences
    assert drawn == planned and len(drawn) > WORKERS
    assert min(absence.worker for absence in drawn) >= spared


def test_each_order_is_given_once_when_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = Schedule.of("local_sgd", 100.0)
    given: list[tuple[int, str]] = []
    monkeypatch.setattr(kills.time, "time", lambda: 1000.0)
    disturbance = Kills(schedule, lambda worker, order: given.append((worker, order)))
    for now_s in range(1000, 1200):
        before = len(given)
        disturbance.go_on(now_s)
        due = [(w, what) for at_s, what, w in schedule.orders if now_s - 1001 < at_s <= now_s - 1000]
        assert given[before:] == due
    assert len(given) == 2 * len(schedule.absences)
