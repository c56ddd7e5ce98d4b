"""`offbeat train --elastic` without its command line: even the worker that writes the summary may die."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from offbeat import LocalSGD
from offbeat.core.replica import Replica
from offbeat.errors import SettingError
from offbeat.experiments.callbacks.recorder import DETAILS
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback
from offbeat.experiments.process_run import RunOptions, train_here
from offbeat.experiments.summary import Summary
from offbeat.experiments.tasks import task
from offbeat.strategies.local_sgd import LocalSGDState
from offbeat.worlds.processes.elastic.registry import MEMBER
from offbeat.worlds.processes.emulation import Emulation
from tests.support.waiting import until


@dataclass(frozen=True, kw_only=True)
class Perilous(LocalSGD):
    """Processes kill themselves before a step; others wait before a step until a process asks to join."""

    deaths: dict[str, int] = field(default_factory=dict)
    waits: dict[str, tuple[int, str]] = field(default_factory=dict)

    async def step(self, state: LocalSGDState, replica: Replica, port: Any) -> None:
        process = os.environ[MEMBER]
        if self.deaths.get(process) == state.step + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if process in self.waits and self.waits[process][0] == state.step + 1:
            asked, candidates = self.waits[process][1], port._heartbeat.candidates
            until(lambda: any(asked in name for name in (*port.member.roster.joining, *candidates())))
        await super().step(state, replica, port)


def no_callbacks(latest: Any, hosts: Any = dict) -> list[Callback]:
    return []


def job(**changes: Any) -> Job:
    defaults: dict[str, Any] = {
        "strategy": LocalSGD(period=4),
        "workers": 3,
        "steps": 200,
        "evaluate_every": 50,
    }
    return Job(task=task("quadratic"), **{**defaults, **changes})


def steps_of(summary: Summary) -> dict[int, int]:
    return {worker["rank"]: worker["steps"] for worker in summary["per_worker"]}


@pytest.mark.processes
def test_rank_0_is_killed_and_comes_back(tmp_path: Path) -> None:
    again = (20, "rank0000-1")
    strategy = Perilous(period=4, deaths={"rank0000-0": 10}, waits={"rank0001-0": again, "rank0002-0": again})
    options = RunOptions(elastic=True, minimum=2)
    summary = train_here(job(strategy=strategy), options, tmp_path, no_callbacks)
    assert summary["complete"]
    assert [entry["step"] for entry in summary["history"]] == [50, 100, 150, 200]
    steps = steps_of(summary)
    assert steps[1] == steps[2] == 200
    assert steps[0] in (200 - 12, 200 - 16, 200 - 20), "those since it is back"


@pytest.mark.processes
def test_another_worker_writes_the_summary_if_rank_0_stays_away(tmp_path: Path) -> None:
    strategy = Perilous(period=4, deaths={"rank0000-0": 60})
    options = RunOptions(elastic=True, minimum=2, restarts=0)
    summary = train_here(job(strategy=strategy), options, tmp_path, no_callbacks)
    assert summary["complete"]
    assert [entry["step"] for entry in summary["history"]] == [50, 100, 150, 200]
    assert all(entry["value"] and entry["loss"] for entry in summary["history"])
    assert json.loads((tmp_path / DETAILS).read_text())["timeline"]


@pytest.mark.processes
def test_history_outlives_all_who_made_it(tmp_path: Path) -> None:
    """Rank 0 dies and comes back; then rank 1 dies, which had seen the first evaluations, and stays away."""
    strategy = Perilous(
        period=4,
        deaths={"rank0000-0": 60, "rank0001-0": 120},
        waits={"rank0001-0": (70, "rank0000-1")},
    )
    options = RunOptions(elastic=True, restarts=1)
    summary = train_here(job(strategy=strategy, workers=2), options, tmp_path, no_callbacks)
    assert summary["complete"]
    assert [entry["step"] for entry in summary["history"]] == [50, 100, 150, 200]
    assert all(entry["value"] and entry["loss"] for entry in summary["history"])


def test_what_cannot_be_elastic_is_refused_before_processes_start() -> None:
    RunOptions(elastic=True).check(job())
    with pytest.raises(SettingError, match="data injection"):
        RunOptions(elastic=True).check(job(inject=(0.5, 0.5), order="seldp"))
    with pytest.raises(SettingError, match="emulated bandwidth"):
        RunOptions(elastic=True, emulation=Emulation(bandwidth="1gbit")).check(job())
    with pytest.raises(SettingError, match="add up to 1"):
        RunOptions(elastic=True).check(job(strategy=LocalSGD(weighted=True)))
    RunOptions().check(job(strategy=LocalSGD(weighted=True)))
