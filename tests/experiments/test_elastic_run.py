"""Elastic jobs in virtual time: whoever dies, the history is whole, and the summary says what was lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offbeat import BSP, LocalSGD
from offbeat.cli import app
from offbeat.errors import SettingError
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback
from offbeat.experiments.virtual_run import simulate, simulate_here
from offbeat.worlds.virtual.cluster import Absence, Cluster, Hang, dump
from tests.support.virtual_runs import Kept, cluster_of

pytestmark = pytest.mark.virtual


def job(strategy: Any, **changes: Any) -> Job:
    return Job(task=Kept(), strategy=strategy, workers=3, steps=12, evaluate_every=4, **changes)


def no_callbacks(latest: Any, hosts: Any = dict) -> list[Callback]:
    return []


class Told(Callback):
    """What a callback is told, in order."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def started(self, job: Job, total_steps: int) -> None:
        self.events.append("started")

    def stepped(self, step: int, loss: Any, worker: Any) -> None:
        self.events.append(step)

    def published(self, step: int, model: Any) -> None:
        self.events.append(("published", step))

    def evaluated(self, history: Any, worker_totals: Any) -> None:
        self.events.append(("evaluated", [evaluation.step for evaluation in history]))

    def closed(self) -> None:
        self.events.append("closed")


def test_a_model_that_all_publish_is_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated: list[float] = []
    evaluate = Kept.evaluate

    def count(task: Kept, model: Any, data: Any) -> float:
        evaluated.append(evaluate(task, model, data))
        return evaluated[-1]

    monkeypatch.setattr(Kept, "evaluate", count)
    history = simulate(job(BSP()), cluster_of(1.0, 1.0, 1.0), Kept().load(), minimum=1)
    assert [evaluation.value for evaluation in history] == evaluated
    assert len(set(evaluated)) == 3, "another model is evaluated anew"


def test_without_faults_the_history_is_that_of_any_run() -> None:
    cluster = cluster_of(1.0, 1.0, 1.0)
    plain, elastic = (
        simulate(job(LocalSGD(period=3)), cluster, Kept().load(), minimum=minimum) for minimum in (None, 1)
    )
    assert plain == elastic


def test_each_event_is_told_once_though_the_first_worker_dies_and_returns() -> None:
    away = Absence(worker=0, from_s=5.5, until_s=7.2)
    told = Told()
    history = simulate(
        job(BSP()), cluster_of(1.0, 1.0, 1.0, away=(away,)), Kept().load(), lambda ledgers: [told], minimum=2
    )
    assert [evaluation.step for evaluation in history] == [4, 8, 12]
    expected: list[Any] = ["started"]
    for end in (4, 8, 12):
        shown = list(range(4, end + 1, 4))
        expected += [*range(end - 3, end + 1), ("published", end), ("evaluated", shown)]
    assert told.events == [*expected, "closed"]


def test_summary_says_what_was_lost(tmp_path: Path) -> None:
    hung = Hang(worker=2, from_s=4.5, until_s=11.0)
    away = Absence(worker=0, from_s=3.6)
    cluster = cluster_of(1.0, 1.0, 1.0, away=(away,), hung=(hung,))
    summary = simulate_here(
        job(LocalSGD(period=2)), cluster, Kept().load(), tmp_path, no_callbacks, minimum=1
    )
    assert summary["complete"]
    assert [entry["lost_steps"] for entry in summary["per_worker"]] == [1, 0, 1]
    assert summary["lost_steps"] == 2
    assert summary["rosters"] == 4  # all; without the dead; without the hung; with the one that returned
    assert summary["lost_s"] == max(entry["lost_s"] for entry in summary["per_worker"]) > 3


def test_data_injection_is_refused() -> None:
    with pytest.raises(SettingError, match="data injection"):
        simulate(job(BSP(), inject=(0.5, 0.5)), cluster_of(1.0, 1.0, 1.0), Kept().load(), minimum=1)


def command(cluster: Cluster, folder: Path, *options: str) -> Any:
    file = folder / "cluster.toml"
    file.write_text(dump(cluster))
    out = ["--out", str(folder / "out"), "--cluster", str(file), "--workers", "3", "--steps", "6"]
    return CliRunner().invoke(app, ["simulate", "quadratic", *out, *options])


def test_command_line_goes_on_without_the_dead_and_stops_below_the_minimum(tmp_path: Path) -> None:
    cluster = cluster_of(1.0, 1.0, 1.0, away=(Absence(worker=1, from_s=2.5),))
    done = command(cluster, tmp_path, "--elastic", "--minimum", "2")
    assert done.exit_code == 0, done.output
    assert "2 rosters; lost: 0 steps" in done.output
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["steps"] == 6
    stopped = command(cluster, tmp_path, "--elastic", "--minimum", "3", "--force")
    assert stopped.exit_code != 0
    assert "2 of 3 workers are left" in stopped.output + str(stopped.exception)
