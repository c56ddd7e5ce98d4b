"""Evaluations of elastic workers: whose weights they show, and when. That they are free: conformance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from offbeat import LocalSGD
from offbeat.core.ledger import Ledger
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback, Worker
from offbeat.experiments.virtual_run import simulate
from offbeat.worlds.virtual.cluster import Absence, Hang
from tests.conformance.test_looking import EQUAL, STEP_S, Net
from tests.conformance.test_looking_elastic import STEPS, look_every
from tests.support.virtual_runs import cluster_of

pytestmark = pytest.mark.virtual

ALONE = LocalSGD(period=STEPS)  # nothing is exchanged before the end
WHOLE = look_every(1, ALONE, EQUAL).seen


def test_a_mean_is_over_those_who_came_to_the_step() -> None:
    """Worker 1 dies in its sixth step, which the others do not find out before the end."""
    dead = Absence(worker=1, from_s=5.25 * STEP_S)
    left = look_every(1, ALONE, replace(EQUAL, away=(dead,))).seen
    same = [torch.equal(one, other) for one, other in zip(WHOLE, left, strict=True)]
    assert same == [True] * 5 + [False] * (STEPS - 5)


def test_an_evaluation_waits_for_a_worker_that_is_late() -> None:
    """Worker 1 is stopped in its sixth step, but not dropped; its weights of each step are in the mean."""
    hung = Hang(worker=1, from_s=5.25 * STEP_S, until_s=20 * STEP_S)
    run = look_every(1, ALONE, replace(EQUAL, hung=(hung,)))
    assert all(map(torch.equal, run.seen, WHOLE))
    seconds = [evaluation.seconds for evaluation in run.history]
    assert seconds[4] == pytest.approx(5 * STEP_S)
    assert seconds[5] == pytest.approx((6 + 14.75) * STEP_S)


class Told(Callback):
    """The steps and evaluations of a run, in the order in which they were told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def stepped(self, step: int, loss: Any, worker: Any) -> None:
        self.events.append(("stepped", step))

    def evaluated(self, history: Any, worker_totals: Any) -> None:
        self.events.append(("evaluated", history[-1].step))


def test_no_evaluation_waits_for_a_worker_that_has_died() -> None:
    """Worker 1, three times slower, dies in its second step, when the others have made five."""
    dead = Absence(worker=1, from_s=5.5 * STEP_S)
    cluster = cluster_of(STEP_S, 3 * STEP_S, STEP_S, away=(dead,))
    told, task = Told(), Net()
    job = Job(task=task, strategy=ALONE, workers=3, steps=STEPS, evaluate_every=1)
    simulate(job, cluster, task.load(), lambda ledgers: [told], minimum=2)
    evaluated = [("evaluated", step) for step in range(1, STEPS + 1)]
    assert [event for event in told.events if event in evaluated] == evaluated
    before = [told.events.index(event) - told.events.index(("stepped", 5)) for event in evaluated]
    assert [step for step, at in enumerate(before, start=1) if at < 0] == [1], "all wait for worker 1"
    assert told.events.index(evaluated[4]) < told.events.index(("stepped", 6)), "its death ends the wait"
    for step in range(6, STEPS):
        assert told.events.index(evaluated[step - 1]) < told.events.index(("stepped", step + 1))


def test_workers_that_come_at_different_times_read_their_own_ledgers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else N workers that look read N ledgers each, and add N totals up each."""
    read, added = [], []
    totals, sums = Ledger.totals, Worker.sent_bytes
    monkeypatch.setattr(Ledger, "totals", lambda ledger: read.append(ledger.rank) or totals(ledger))
    monkeypatch.setattr(Worker, "sent_bytes", lambda worker, seen: added.append(1) or sums(worker, seen))
    workers = 8
    cluster = cluster_of(*[STEP_S * (1 + rank / 100) for rank in range(workers)])
    job = Job(task=(task := Net()), strategy=ALONE, workers=workers, steps=STEPS, evaluate_every=1)
    history = simulate(job, cluster, task.load(), lambda ledgers: [], minimum=2)
    assert len(history) == STEPS
    slowest_s = STEP_S * (1 + (workers - 1) / 100)
    assert [each.seconds for each in history[:-1]] == [
        pytest.approx((step + 1) * slowest_s) for step in range(STEPS - 1)
    ]
    # of each evaluation all at its opening, and each worker its own; and all once more at the end
    assert len(read) == (2 * STEPS + 1) * workers
    assert len(added) == STEPS
