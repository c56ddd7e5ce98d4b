"""A job over real processes: the summary that rank 0 writes, the timeline, and what is emulated."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from offbeat import ASP, SSP, LocalSGD, Oscars
from offbeat.data.batching import NumberedBatches
from offbeat.data.work import AHEAD, Claims
from offbeat.errors import SettingError
from offbeat.experiments import process_run
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback
from offbeat.experiments.process_run import ProcessWorker, RunOptions, run_rank
from offbeat.experiments.tasks.base import Batch
from offbeat.experiments.tasks.quadratic import Quadratic
from offbeat.worlds.processes.emulation import Emulation
from offbeat.worlds.processes.server.transport import refusals
from tests.support.crew import Crew
from tests.support.limits import HANG_S
from tests.support.lost import patched

pytestmark = pytest.mark.processes

JOB = Job(task=Quadratic(), strategy=LocalSGD(period=2), workers=2, steps=6, evaluate_every=3)


def test_the_emulated_rate_is_in_bits_per_second() -> None:
    assert RunOptions().bits_per_s is None
    assert RunOptions(emulation=Emulation(bandwidth="200mbit")).bits_per_s == 2e8
    with pytest.raises(SettingError, match="kbit, mbit, gbit"):
        RunOptions(emulation=Emulation(bandwidth="fast")).bits_per_s  # noqa: B018


def test_a_run_counts_refused_updates_and_its_ranks_do_not_tell_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "level", logging.WARNING)
    monkeypatch.setattr(process_run, "run", lambda *_: [])
    run_rank(JOB, RunOptions(), tmp_path, lambda *_: [])
    assert refusals.level == logging.ERROR, "they would break the progress bar, and are told at the end"


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


@dataclass(frozen=True, kw_only=True)
class Drawing(Quadratic):
    """Notes the samples of each gradient of this process."""

    dimension: int = 16
    drawn: list[tuple[int, ...]] = field(default_factory=list, compare=False)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        self.drawn.append(tuple(batch[0].tolist()))
        return super().loss(model, batch)


def _shared(strategy: Any, folder: Path) -> list[tuple[int, ...]]:
    """Return the batches of this rank; rank 1 is slow."""
    task = Drawing(samples=200)
    job = Job(task=task, strategy=strategy, workers=2, steps=40, evaluate_every=15)
    options = RunOptions(timeout_s=HANG_S, emulation=Emulation(pace_s=0.002, slow={1: 5.0}))
    run_rank(job, options, folder, lambda *_: [])
    return task.drawn


@pytest.mark.parametrize("strategy", [ASP(), SSP(staleness=1), Oscars(tau=4)], ids=lambda s: s.name)
def test_ranks_share_all_batches(strategy: Any, crew: Callable[[int], Crew], tmp_path: Path) -> None:
    drawn = crew(2).run(_shared, strategy, tmp_path)
    batches = NumberedBatches(200, 2, 8, seed=0)
    expected = [tuple(batches[number].tolist()) for number in range(80)]
    assert sorted(drawn[0] + drawn[1]) == sorted(expected), "each batch was trained once"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["work"], summary["complete"], summary["samples"]) == ("shared", True, 640)
    assert [point["step"] for point in summary["history"]] == [15, 30, 40]


class Few:
    """Claims of a rank that comes too late for all but a few batches."""

    def __init__(self, claims: Claims, most: int) -> None:
        self._claims, self._left = claims, most

    def claim(self) -> int | None:
        self._left -= 1
        return self._claims.claim() if self._left >= 0 else None


class LateWorker(ProcessWorker):
    def share(self, batches: int) -> Claims:
        claims = super().share(batches)
        return Few(claims, 3) if self.rank else claims


def _late(strategy: Any, folder: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offbeat.experiments.process_run.ProcessWorker", LateWorker)
        return len(_shared(strategy, folder))


@pytest.mark.parametrize("strategy", [SSP(staleness=1), Oscars(tau=4)], ids=lambda s: s.name)
def test_nobody_waits_for_a_rank_without_batches(
    strategy: Any, crew: Callable[[int], Crew], tmp_path: Path
) -> None:
    assert crew(2).run(_late, strategy, tmp_path) == [80 - 3 - AHEAD, 3]


def _begun(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    """Return what rank 0 does first, in order: steps, and waits for all, with whether they count."""
    done: list[str] = []
    wait_for_all = process_run.wait_for_all

    async def noted(port: Any, device: Any) -> None:
        done.append("uncounted wait" if port.ledger.is_paused else "counted wait")
        await wait_for_all(port, device)

    class Steps(Callback):
        def stepped(self, step: int, loss: Tensor, worker: Any) -> None:
            done.append(f"step {step}")

    patch.setattr(process_run, "wait_for_all", noted)
    run_rank(JOB, RunOptions(timeout_s=HANG_S), folder, lambda *_: [Steps()])
    return done[:2]


def test_all_ranks_begin_at_once(crew: Callable[[int], Crew], tmp_path: Path) -> None:
    """On a slow link the first weights reach some ranks later. That is no training, nor rank 0's wait."""
    first, _ = crew(2).run(patched, _begun, tmp_path)
    assert first == ["uncounted wait", "step 1"]
