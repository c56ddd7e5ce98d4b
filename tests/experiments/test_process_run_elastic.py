"""`offbeat train --elastic` without its command line: even the worker that writes the summary may die."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from offbeat import LocalSGD
from offbeat.errors import SettingError
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback, Worker
from offbeat.experiments.process_run import RunOptions, train_here
from offbeat.experiments.tasks import task
from offbeat.worlds.processes.elastic.registry import MEMBER
from offbeat.worlds.processes.emulation import Emulation
from tests.support.waiting import until


class DieOnce(Callback):
    """Rank 0 kills itself at a step. The others wait a little later until it asks to be let in again."""

    def stepped(self, step: int, loss: Tensor, worker: Worker) -> None:
        if step == 10 and os.environ[MEMBER] == "rank0000-0":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 20 and worker.clock == 0:
            port: Any = worker.port
            until(lambda: port.world == 3 or any("rank0000-1" in n for n in port._heartbeat.candidates()))


def callbacks(latest: Any, hosts: Any = dict) -> list[Callback]:
    return [DieOnce()]


def job(**changes: Any) -> Job:
    defaults: dict[str, Any] = {
        "strategy": LocalSGD(period=4),
        "workers": 3,
        "steps": 200,
        "evaluate_every": 50,
    }
    return Job(task=task("quadratic"), **{**defaults, **changes})


@pytest.mark.processes
def test_run_ends_although_rank_0_is_killed(tmp_path: Path) -> None:
    options = RunOptions(elastic=True, minimum=2)
    summary = train_here(job(), options, tmp_path, callbacks)
    assert summary["complete"]
    assert summary["history"][-1]["step"] == 200
    steps = {worker["rank"]: worker["steps"] for worker in summary["per_worker"]}
    assert steps[1] == steps[2] == 200
    assert 0 < steps[0] < 200, "those since it is back"


def test_what_cannot_be_elastic_is_refused_before_processes_start() -> None:
    RunOptions(elastic=True).check(job())
    with pytest.raises(SettingError, match="data injection"):
        RunOptions(elastic=True).check(job(inject=(0.5, 0.5), order="seldp"))
    with pytest.raises(SettingError, match="emulated bandwidth"):
        RunOptions(elastic=True, emulation=Emulation(bandwidth="1gbit")).check(job())
    with pytest.raises(SettingError, match="add up to 1"):
        RunOptions(elastic=True).check(job(strategy=LocalSGD(weighted=True)))
    RunOptions().check(job(strategy=LocalSGD(weighted=True)))
