"""The recorder: a valid summary exists after every evaluation, and also when a run is stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from offbeat import LocalSGD
from offbeat.core.ledger import Ledger, Span
from offbeat.errors import OffbeatError
from offbeat.experiments.callbacks.recorder import DETAILS, Recorder
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback, Evaluation
from offbeat.experiments.tasks.quadratic import Quadratic
from offbeat.experiments.virtual_run import simulate
from tests.support.small_disk import SmallDisk
from tests.support.small_disk import small_disk as small_disk
from tests.support.virtual_runs import cluster_of

pytestmark = pytest.mark.virtual

JOB = Job(task=Quadratic(), strategy=LocalSGD(period=2), workers=2, steps=6, evaluate_every=3)


class StopError(Exception):
    pass


class Watching(Callback):
    """Reads the summary after every evaluation; may stop the run after one step or the other."""

    def __init__(self, folder: Path, stop_at: int = 0) -> None:
        self.seen: list[dict[str, Any]] = []
        self._folder, self._stop_at = folder, stop_at

    def stepped(self, step: int, *_: Any) -> None:
        if step == self._stop_at:
            raise StopError

    def evaluated(self, history: list[Evaluation], *_: Any) -> None:
        self.seen.append(json.loads((self._folder / "summary.json").read_text()))


def run(folder: Path, watching: Watching) -> None:
    def callbacks(ledgers: list[Ledger]) -> list[Callback]:
        latest = lambda: [ledger.totals() for ledger in ledgers]  # noqa: E731
        return [Recorder(JOB, "virtual", folder, latest, cluster="mine"), watching]

    simulate(JOB, cluster_of(0.1, 0.1), JOB.task.load(), callbacks)


def test_a_summary_grows_with_every_evaluation(tmp_path: Path) -> None:
    watching = Watching(tmp_path)
    run(tmp_path, watching)
    assert [(seen["steps"], seen["complete"]) for seen in watching.seen] == [(3, False), (6, True)]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == watching.seen[-1]
    assert (summary["cluster"], summary["world"]) == ("mine", "virtual")
    details = json.loads((tmp_path / DETAILS).read_text())
    assert details["decisions"] == {"steps": 6, "width": 1, "synced": [0, 1, 0, 1, 0, 1]}
    assert {"command", "started", "environment"} <= details.keys()
    recorder = Recorder(JOB, "virtual", tmp_path, list)
    recorder.ended([[Span("step", "1", 2.0, 3.5)]])
    assert json.loads((tmp_path / DETAILS).read_text())["timeline"]["seconds"] == 1.5


def test_a_run_that_is_stopped_leaves_what_is_known_by_then(tmp_path: Path) -> None:
    with pytest.raises(StopError):
        run(tmp_path, Watching(tmp_path, stop_at=5))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert not summary["complete"]
    assert [point["step"] for point in summary["history"]] == [3]
    assert summary["per_worker"][0]["steps"] == 5
    assert json.loads((tmp_path / DETAILS).read_text())["decisions"]["steps"] == 5


class Filling(Callback):
    """Fills the disk before the first evaluation, and frees it before the second, or never."""

    def __init__(self, disk: SmallDisk, frees: bool) -> None:
        self._disk, self._frees = disk, frees

    def stepped(self, step: int, *_: Any) -> None:
        if step == 2:
            self._disk.fill()
        if step == 5 and self._frees:
            self._disk.free()


def run_on(disk: SmallDisk, frees: bool) -> Path:
    out = disk.folder / "run"

    def callbacks(ledgers: list[Ledger]) -> list[Callback]:
        latest = lambda: [ledger.totals() for ledger in ledgers]  # noqa: E731
        return [Filling(disk, frees), Recorder(JOB, "virtual", out, latest)]

    simulate(JOB, cluster_of(0.1, 0.1), JOB.task.load(), callbacks)
    return out


def test_a_disk_that_is_full_at_an_evaluation_does_not_end_the_training(
    small_disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    out = run_on(small_disk, frees=True)
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["steps"], summary["complete"]) == (6, True)
    assert sorted(path.name for path in out.iterdir()) == [DETAILS, "summary.json"], "and nothing else"
    assert caplog.text.count("the summary cannot be written") == 1
    assert caplog.text.count("the summary is written again") == 1


def test_a_result_that_cannot_be_written_at_the_end_is_told(small_disk: SmallDisk) -> None:
    with pytest.raises(
        OffbeatError, match=r"the run is complete, with .* at the end, but its summary cannot"
    ):
        run_on(small_disk, frees=False)
