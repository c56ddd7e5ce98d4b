"""A job over real processes: the summary that rank 0 writes, the timeline, and what is emulated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from offbeat import LocalSGD
from offbeat.errors import SettingError
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback
from offbeat.experiments.process_run import RunOptions, run_rank
from offbeat.experiments.tasks.quadratic import Quadratic
from offbeat.worlds.processes.emulation import Emulation
from tests.support.crew import Crew
from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes

JOB = Job(task=Quadratic(), strategy=LocalSGD(period=2), workers=2, steps=6, evaluate_every=3)


def test_the_emulated_rate_is_in_bits_per_second() -> None:
    assert RunOptions().bits_per_s is None
    assert RunOptions(emulation=Emulation(bandwidth="200mbit")).bits_per_s == 2e8
    with pytest.raises(SettingError, match="kbit, mbit, gbit"):
        RunOptions(emulation=Emulation(bandwidth="fast")).bits_per_s  # noqa: B018


def _ran(folder: Path) -> int:
    """Count how often callbacks are made on this rank."""
    made: list[None] = []

    def callbacks(*_: object) -> list[Callback]:
        made.append(None)
        return []

    options = RunOptions(
        timeout_s=HANG_S, trace=folder / "trace.json", emulation=Emulation(bandwidth="1gbit")
    )
    run_rank(JOB, options, folder, callbacks)
    return len(made)


def test_rank_0_writes_for_all(crew: Callable[[int], Crew], tmp_path: Path) -> None:
    assert crew(2).run(_ran, tmp_path) == [1, 0], "callbacks are rank 0's"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["world"], summary["complete"], summary["workers"]) == ("processes", True, 2)
    assert [point["step"] for point in summary["history"]] == [3, 6]
    assert [(worker["rank"], worker["sync_steps"]) for worker in summary["per_worker"]] == [(0, 3), (1, 3)]
    assert len(summary["emulated"]) == 1
    details = json.loads((tmp_path / "details.json").read_text())
    assert details["decisions"]["synced"] == [0, 1, 0, 1, 0, 1]
    assert len(details["timeline"]["workers"]) == 2, "of both ranks"
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
