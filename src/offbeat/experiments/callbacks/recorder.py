"""Recorder: keeps a run's summary on disk up to date, so that whatever happens a valid one is there.

`summary.json` is what came of a run; the same virtual run writes the same one. Beside it, `details.json`
holds the command and the machine that made it, and what only a page wants to draw.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from offbeat.core.files import write_atomic
from offbeat.core.ledger import Span, WorkerTotals
from offbeat.experiments import trace
from offbeat.experiments.loop import Callback, Evaluation, Job, Worker
from offbeat.experiments.provenance import origin
from offbeat.experiments.report.sync_histogram import SyncHistogram
from offbeat.experiments.summary import json_safe, summarize, write

DETAILS = "details.json"


class Recorder(Callback):
    def __init__(
        self, job: Job, world: str, out: Path, latest: Callable[[], list[WorkerTotals]], **extra: Any
    ) -> None:
        self._job = job
        self._world = world
        self._out = out
        self._latest = latest
        self._extra = extra
        self._history: list[Evaluation] = []
        self._complete = False
        self._details: dict[str, Any] = origin()
        self._decisions = SyncHistogram()

    def started(self, job: Job, total_steps: int) -> None:
        self._total_steps = total_steps

    def stepped(self, step: int, loss: Tensor, worker: Worker) -> None:
        self._decisions.step(worker.port.ledger.sync_steps)

    def evaluated(self, history: list[Evaluation], entries: list[WorkerTotals]) -> None:
        self._history = history
        self._complete = history[-1].step == self._total_steps
        self._write(entries)

    def closed(self) -> None:
        if not self._complete:  # stopped half-way: what is known until here
            self._write(self._latest())

    def ended(self, timeline: list[list[Span]]) -> None:
        self._details["timeline"] = trace.excerpt(timeline)
        self._write_details()

    def _write(self, entries: list[WorkerTotals]) -> None:
        known = summarize(
            self._job, self._world, self._history, entries, complete=self._complete, **self._extra
        )
        write(self._out, known)
        self._write_details()

    def _write_details(self) -> None:
        self._details["decisions"] = self._decisions.known()
        write_atomic(self._out / DETAILS, json.dumps(json_safe(self._details), allow_nan=False))
