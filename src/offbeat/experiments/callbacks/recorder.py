"""A run's summary on disk, updated at every evaluation, so that an aborted run leaves a valid one.

`summary.json` holds the result of a run; the same virtual run writes the same file. Beside it, `details.json`
holds the command, the machine, and data that only the report page draws.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from offbeat.core.files import write_atomic
from offbeat.core.ledger import Span, WorkerTotals
from offbeat.errors import OffbeatError
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback, Evaluation, Worker
from offbeat.experiments.provenance import origin
from offbeat.experiments.report.sync_histogram import SyncHistogram
from offbeat.experiments.summary import json_safe, summarize, write_summary
from offbeat.experiments.timeline import excerpt

DETAILS = "details.json"
log = logging.getLogger("offbeat")


class Recorder(Callback):
    """Writer of `summary.json` and `details.json` into the folder `out`.

    Where any worker may die, each has one, and that of the worker that `leads` at that moment writes.
    """

    def __init__(
        self,
        job: Job,
        world: str,
        out: Path,
        latest: Callable[[], list[WorkerTotals]],
        leads: Callable[[], bool] = lambda: True,
        until_s: float | None = None,
        **extra: Any,
    ) -> None:
        self._job = job
        self._world = world
        self._out = out
        self._latest = latest
        self._leads = leads
        self._until_s = math.inf if until_s is None else until_s
        self._extra = extra if until_s is None else {"until_s": until_s, **extra}
        self._history: list[Evaluation] = []
        self._complete = False  # all steps are done
        self._time_is_up = False
        self._failing = False  # whether the disk refuses the summary
        self._details: dict[str, Any] = origin()
        self._syncs = SyncHistogram()

    def started(self, job: Job, total_steps: int) -> None:
        self._total_steps = total_steps

    def stepped(self, step: int, loss: Tensor, worker: Worker) -> None:
        self._syncs.step(worker.port.ledger.sync_steps)
        self._time_is_up = worker.seconds >= self._until_s

    def evaluated(self, history: list[Evaluation], worker_totals: list[WorkerTotals]) -> None:
        self._history = history
        self._complete = history[-1].step == self._total_steps
        self._write(worker_totals)

    def closed(self) -> None:
        if not self._complete and self._leads():  # the run was stopped: write the results so far
            self._write(self._latest())

    def ended(self, timeline: list[list[Span]]) -> None:
        self._details["timeline"] = excerpt(timeline)
        if self._leads():
            self._write_details()

    def _write(self, worker_totals: list[WorkerTotals]) -> None:
        if not self._leads():
            return
        summary = summarize(
            self._job,
            self._world,
            self._history,
            worker_totals,
            complete=self._complete or self._time_is_up,
            **self._extra,
        )
        try:
            write_summary(self._out, summary)
        except OSError as failed:
            self._note_failure(failed)
        else:
            if self._failing:
                log.warning("the summary is written again: %s", self._out)
            self._failing = False
        self._write_details()

    def _note_failure(self, failed: OSError) -> None:
        """Train on without a summary on disk, and say so once; at the end, say that the result is lost."""
        if self._complete:
            raise OffbeatError(
                f"the run is complete, with {self._history[-1].value:g} at the end, but its summary cannot "
                f"be written to {self._out}: {failed}"
            ) from failed
        if not self._failing:
            log.error("the summary cannot be written to %s (%s): training continues", self._out, failed)
        self._failing = True

    def _write_details(self) -> None:
        self._details["decisions"] = self._syncs.to_json()
        try:
            write_atomic(self._out / DETAILS, json.dumps(json_safe(self._details), allow_nan=False))
        except OSError as failed:
            log.error("%s cannot be written to %s: %s", DETAILS, self._out, failed)
