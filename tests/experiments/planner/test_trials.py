"""Trials: each is stopped as soon as its result is known, and says what came of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from offbeat import BSP, SSP, LocalSGD
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Evaluation
from offbeat.experiments.planner.ranking import Outcome
from offbeat.experiments.planner.trials import WATCHED, Crossing, Trial, attempt, value_untrained
from offbeat.experiments.tasks.quadratic import Quadratic
from offbeat.worlds.virtual.cluster import Absence, ServerMachines
from offbeat.worlds.virtual.messages import REQUEST_BYTES
from tests.support.virtual_runs import cluster_of

pytestmark = pytest.mark.virtual

TASK = Quadratic(dimension=1000, lr=0.05)
JOB = Job(task=TASK, strategy=BSP(), workers=4, steps=40, evaluate_every=2, target=250.0)
CLUSTER = cluster_of(*[0.1] * 4)


def test_a_trial_ends_soon_after_the_target_and_bsp_goes_on() -> None:
    data = TASK.load()
    trial = attempt(JOB, CLUSTER, data)
    assert trial.history[0].value <= 250.0, "reached at the first evaluation"
    assert len(trial.history) == 1 + WATCHED
    assert attempt(JOB, CLUSTER, data, whole=True).history[-1].step == 40


def test_the_target_is_found_between_evaluations() -> None:
    """Without noise the loss of one step is known: coarse evaluations find the target between them."""
    task = Quadratic(dimension=1000, lr=0.05, noise=0.0)
    fine = replace(JOB, task=task, evaluate_every=1, target=200.0)
    data = task.load()
    exact = attempt(fine, CLUSTER, data).reached
    coarse = attempt(replace(fine, evaluate_every=4), CLUSTER, data).reached
    only_one = attempt(replace(fine, evaluate_every=8), CLUSTER, data)
    assert exact is not None and coarse is not None and only_one.reached is not None
    assert exact.step % 1 > 0, "between two steps"
    assert coarse.step == pytest.approx(exact.step, abs=0.3), "not the four steps of its evaluations"
    assert coarse.seconds == pytest.approx(0.11 * coarse.step, rel=0.1)
    assert only_one.history[0].value <= 200.0
    assert 0 < only_one.reached.step < 8, "between the untrained model and the first evaluation"
    assert value_untrained(fine, data) == pytest.approx(275.0)


def test_one_that_is_too_slow_is_stopped_only_when_an_evaluation_after_the_limit_shows_it() -> None:
    """The fault: with the target between two evaluations, one was stopped 0.05 s before the second."""
    data = TASK.load()
    ends = [point.seconds for point in attempt(replace(JOB, target=-1.0), CLUSTER, data).history]
    between = (ends[1] + ends[2]) / 2
    trial = attempt(replace(JOB, target=-1.0), CLUSTER, data, limit_s=between)
    assert trial.stopped and trial.reached is None
    assert [point.step for point in trial.history] == [2, 4, 6]
    assert trial.seconds == ends[2]
    values = [point.value for point in trial.history]
    saved = attempt(replace(JOB, target=(values[1] + values[2]) / 2), CLUSTER, data, limit_s=between)
    assert not saved.stopped and saved.reached is not None
    assert saved.reached.step == pytest.approx(5.0), "it is the evaluation after the limit that shows it"


def test_the_bytes_of_a_plan_are_those_of_workers_and_server() -> None:
    """The fault: with [server] a plan showed half of what was sent."""
    data, weights = TASK.load(), 4 * 1008  # padded to 64 bytes
    job = replace(JOB, strategy=SSP(staleness=0), evaluate_every=1, target=250.0)
    served = replace(CLUSTER, server=ServerMachines(up_bits_per_s=1e9, down_bits_per_s=1e9))
    trial = attempt(job, served, data)
    each = 4 * (weights + REQUEST_BYTES + weights)  # pushes, requests, answers
    assert [point.bytes_total for point in trial.history] == [each * point.step for point in trial.history]
    assert trial.reached is not None
    assert trial.reached.bytes_total == pytest.approx(each * trial.reached.step)
    assert Outcome(job.strategy, (trial,)).nbytes.mean == trial.reached.bytes_total


def test_a_target_counts_from_the_first_exchange_on() -> None:
    """The fault: one that had sent nothing was first, by an average that only the evaluation made."""
    job = replace(JOB, strategy=LocalSGD(period=12), target=250.0)
    trial = attempt(job, CLUSTER, TASK.load())
    assert trial.history[0].value <= 250.0, "at the target before its first exchange"
    assert trial.exchanged_at == 12 and trial.reached is not None
    exchanged = next(point for point in trial.history if point.step == 12)
    assert trial.reached == Crossing(12, exchanged.seconds, exchanged.bytes_sent) and exchanged.bytes_sent > 0
    assert trial.history[-1].step == 12 + 2 * WATCHED
    stopped = attempt(job, CLUSTER, TASK.load(), limit_s=trial.history[1].seconds)
    assert stopped.stopped and stopped.reached is None and stopped.history[-1].step == 6
    never = attempt(replace(job, steps=10), CLUSTER, TASK.load())
    assert never.exchanged_at is None and never.reached is None
    alone = attempt(replace(job, workers=1), cluster_of(0.1), TASK.load())
    assert alone.reached is not None and len(alone.history) == 1 + WATCHED, "it has nobody to send to"


def test_one_that_cannot_run_says_why() -> None:
    stuck = replace(CLUSTER, away=(Absence(worker=1, from_s=0.25),))
    trial = attempt(JOB, stuck, TASK.load(), whole=True)
    assert "worker 1 waits for nothing: it left for good at 0.25 s" in trial.problem
    assert not trial.stopped and [point.step for point in trial.history] == [2]


def test_another_target_judges_the_same_evaluations_anew() -> None:
    values = (300.0, 200.0, 100.0)
    history = tuple(Evaluation(step, step / 10, 0.0, value, step) for step, value in enumerate(values, 1))
    trial = Trial(JOB, history)
    assert trial.reached == Crossing(1.5, pytest.approx(0.15), 1.5) and trial.value == 100.0
    assert trial.with_target(150.0).reached == Crossing(2.5, pytest.approx(0.25), 2.5)
    assert trial.with_target(200.0).reached == Crossing(2, pytest.approx(0.2), 2)
    assert trial.with_target(300.0).reached == Crossing(1, 0.1, 1), "nothing is known of before"
    assert replace(trial, start=400.0).with_target(350.0).reached == Crossing(0.5, pytest.approx(0.05), 0.5)
    assert replace(trial, start=310.0).with_target(320.0).reached == Crossing(0, 0, 0)
    assert trial.with_target(50.0).reached is None
    assert Trial(JOB).value is None
    assert Trial(JOB, (Evaluation(1, 0.1, 0.0, math.nan),)).value is None
