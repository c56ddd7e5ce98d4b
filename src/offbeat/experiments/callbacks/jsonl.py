"""A log with one line of JSON per step of worker 0, and one per evaluation."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from offbeat.core.ledger import WorkerTotals
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback, Evaluation, Worker
from offbeat.experiments.summary import json_safe

log = logging.getLogger("offbeat")


class JsonLines(Callback):
    """A file of JSON lines, each flushed whole: a program that follows the file never reads half a line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8", buffering=1)
        self._before = WorkerTotals(rank=0)
        self._failing = False  # whether the disk refuses lines

    def started(self, job: Job, total_steps: int) -> None:
        run = {"strategy": job.strategy.name, "settings": job.strategy.settings(), "task": job.task.name}
        self._write("start", **run, workers=job.workers, seed=job.seed, steps=total_steps)

    def stepped(self, step: int, loss: Tensor, worker: Worker) -> None:
        now, before = worker.port.ledger.totals(), self._before
        self._before = now
        self._write(
            "step",
            step=step,
            seconds=now.seconds,
            loss=loss.item(),
            samples=now.samples - before.samples,
            bytes_sent=now.bytes_sent - before.bytes_sent,
            bytes_server=now.bytes_server - before.bytes_server,
            compute_s=now.compute_s - before.compute_s,
            communicate_s=now.communicate_s - before.communicate_s,
            wait_s=now.wait_s - before.wait_s,
            synced=now.sync_steps > before.sync_steps,
            staleness=_latest_staleness(before.staleness, now.staleness),
        )

    def evaluated(self, history: list[Evaluation], worker_totals: list[WorkerTotals]) -> None:
        last = history[-1]
        self._write(
            "evaluation", step=last.step, seconds=last.seconds, loss=last.loss, value=last.value,
            bytes_sent=last.bytes_sent, bytes_server=last.bytes_server, bytes_total=last.bytes_total,
        )  # fmt: skip

    def closed(self) -> None:
        with suppress(OSError):  # it has been logged
            self._file.close()

    def _write(self, event: str, **known: Any) -> None:
        try:
            self._file.write(json.dumps({"event": event, **json_safe(known)}, allow_nan=False) + "\n")
            self._failing = False
        except OSError as failed:  # a full disk does not end the training
            if not self._failing:
                log.error("%s cannot be written (%s): training continues", self._file.name, failed)
            self._failing = True


def _latest_staleness(before: dict[str, int], now: dict[str, int]) -> int | None:
    """Return the greatest staleness among the reads of one step; None if the step read nothing."""
    new = [int(staleness) for staleness, reads in now.items() if reads > before.get(staleness, 0)]
    return max(new, default=None)
