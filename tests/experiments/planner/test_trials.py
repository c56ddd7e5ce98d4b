"""Trials: each is stopped as soon as its result is known, and says what came of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from offbeat import BSP
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Evaluation
from offbeat.experiments.planner.trials import AFTERWARDS, Trial, attempt
from offbeat.experiments.tasks.quadratic import Quadratic
from offbeat.worlds.virtual.cluster import Absence
from tests.support.virtual_runs import cluster_of

pytestmark = pytest.mark.virtual

TASK = Quadratic(dimension=1000, lr=0.05)
JOB = Job(task=TASK, strategy=BSP(), workers=4, steps=40, evaluate_every=2, target=250.0)
CLUSTER = cluster_of(*[0.1] * 4)


def test_a_trial_ends_soon_after_the_target_and_bsp_goes_on() -> None:
    data = TASK.load()
    trial = attempt(JOB, CLUSTER, data)
    assert trial.reached is trial.history[0]
    assert len(trial.history) == 1 + AFTERWARDS
    assert attempt(JOB, CLUSTER, data, whole=True).history[-1].step == 40
    assert attempt(JOB, CLUSTER, data, limit_s=1e-9).reached is None


def test_one_that_is_too_slow_is_stopped_after_the_step_that_shows_it() -> None:
    trial = attempt(replace(JOB, target=-1.0), CLUSTER, TASK.load(), limit_s=0.35)
    assert trial.stopped and trial.reached is None
    assert 0.35 < trial.seconds < 0.35 + 2 * 0.1
    assert [point.step for point in trial.history] == [2]


def test_one_that_cannot_run_says_why() -> None:
    stuck = replace(CLUSTER, away=(Absence(worker=1, from_s=0.25),))
    trial = attempt(JOB, stuck, TASK.load(), whole=True)
    assert "worker 1 waits for nothing: it left for good at 0.25 s" in trial.problem
    assert not trial.stopped and [point.step for point in trial.history] == [2]


def test_another_target_judges_the_same_evaluations_anew() -> None:
    values = (300.0, 200.0, 100.0)
    history = tuple(Evaluation(step, step / 10, 0.0, value) for step, value in enumerate(values, 1))
    trial = Trial(JOB, history)
    assert trial.reached is history[1] and trial.value == 100.0
    assert trial.with_target(150.0).reached is history[2]
    assert trial.with_target(50.0).reached is None
    assert Trial(JOB).value is None
    assert Trial(JOB, (Evaluation(1, 0.1, 0.0, math.nan),)).value is None
