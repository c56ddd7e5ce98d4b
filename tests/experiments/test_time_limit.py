"""Runs that end when their time is up, and workers that come and go as the cluster says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from offbeat import ASP, BSP, LocalSGD
from offbeat.errors import SettingError
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Evaluation
from offbeat.experiments.virtual_run import simulate, simulate_here
from offbeat.worlds.virtual.cluster import Churn, Cluster
from offbeat.worlds.virtual.failures import RandomFailures
from tests.support.virtual_runs import AnyStrategy, Kept, cluster_of

pytestmark = pytest.mark.virtual
CLUSTER = cluster_of(1.0, 1.5, 1.2, latency_s=0.01)
CHURN = replace(CLUSTER, churn=Churn(mean_life_s=6.0, away_s=(1.0, 2.5)))


def job_of(strategy: AnyStrategy, steps: int = 20) -> Job:
    return Job(task=Kept(), strategy=strategy, workers=3, steps=steps, evaluate_every=2, seed=4)


def run(
    strategy: AnyStrategy, cluster: Cluster = CLUSTER, until_s: float | None = None, **rest: int
) -> list[Evaluation]:
    job = job_of(strategy)
    return simulate(job, cluster, job.task.load(), until_s=until_s, **rest)


@pytest.mark.parametrize(
    ("strategy", "rest"), [(BSP(), {}), (ASP(), {}), (BSP(), {"minimum": 1})], ids=["bsp", "asp", "elastic"]
)
def test_a_limited_run_is_the_beginning_of_the_whole_one(strategy: AnyStrategy, rest: dict[str, int]) -> None:
    whole, limited = run(strategy, **rest), run(strategy, until_s=11.0, **rest)
    assert 2 <= len(limited) < len(whole)
    assert limited == whole[: len(limited)]
    assert limited[-1].seconds <= 11.0 + 1.6, "a step of worker 0 may end, and be evaluated, after it"
    assert run(strategy, until_s=1000.0, **rest) == whole


def test_a_run_whose_time_is_up_is_complete(tmp_path: Path) -> None:
    job = job_of(LocalSGD(period=2))
    summary = simulate_here(
        job, CLUSTER, job.task.load(), tmp_path, lambda latest, hosts=dict: [], until_s=9.0
    )
    assert summary["complete"] and summary["until_s"] == 9.0
    assert summary["history"][-1]["step"] < 20


@pytest.mark.parametrize(
    ("strategy", "rest", "spared"),
    [(BSP(), {}, 0), (BSP(), {"minimum": 1}, 0), (ASP(), {}, 1)],
    ids=["all wait", "elastic", "server"],
)
def test_churn_is_the_absences_that_its_source_draws(
    strategy: AnyStrategy, rest: dict[str, int], spared: int
) -> None:
    source = RandomFailures(6.0, (1.0, 2.5), paid_away=False)
    away = [absence for worker in range(spared, 3) for absence in source.absences(worker, 4, 30.0)]
    assert away
    told = run(strategy, replace(CLUSTER, away=tuple(away)), until_s=30.0, **rest)
    assert run(strategy, CHURN, until_s=30.0, **rest) == told != run(strategy, until_s=30.0, **rest)


def test_a_run_that_outlasts_its_absences_is_refused() -> None:
    rare = replace(CLUSTER, churn=Churn(mean_life_s=40.0, away_s=(2000.0,)))
    with pytest.raises(SettingError, match=r"outlasted its trace of 600 s.*a time limit"):
        run(BSP(), rare)
