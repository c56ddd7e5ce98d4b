"""StepLog: a line of JSON for every step of worker 0, and one for every evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from offbeat.core.ledger import WorkerTotals
from offbeat.experiments.loop import Callback, Evaluation, Job, Worker
from offbeat.experiments.summary import json_safe


class JsonLines(Callback):
    """Lines are complete at any moment: whoever follows the file never reads half of one."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8", buffering=1)
        self._before = WorkerTotals(rank=0)

    def started(self, job: Job, total_steps: int) -> None:
        about = {"strategy": job.strategy.name, "settings": job.strategy.settings(), "task": job.task.name}
        self._line("start", **about, workers=job.workers, seed=job.seed, steps=total_steps)

    def stepped(self, step: int, loss: Tensor, worker: Worker) -> None:
        now, before = worker.port.ledger.totals(), self._before
        self._before = now
        self._line(
            "step",
            step=step,
            seconds=now.seconds,
            loss=loss.item(),
            samples=now.samples - before.samples,
            bytes_sent=now.bytes_sent - before.bytes_sent,
            compute_s=now.compute_s - before.compute_s,
            communicate_s=now.communicate_s - before.communicate_s,
            wait_s=now.wait_s - before.wait_s,
            synced=now.sync_steps > before.sync_steps,
            staleness=_latest_staleness(before.staleness, now.staleness),
        )

    def evaluated(self, history: list[Evaluation], entries: list[WorkerTotals]) -> None:
        last = history[-1]
        self._line(
            "evaluation", step=last.step, seconds=last.seconds, loss=last.loss, value=last.value,
            bytes_sent=last.bytes_sent,
        )  # fmt: skip

    def closed(self) -> None:
        self._file.close()

    def _line(self, event: str, **known: Any) -> None:
        self._file.write(json.dumps({"event": event, **json_safe(known)}, allow_nan=False) + "\n")


def _latest_staleness(before: dict[str, int], now: dict[str, int]) -> int | None:
    """How far behind the reads of one step were, at the most; None if it read nothing."""
    new = [int(behind) for behind, times in now.items() if times > before.get(behind, 0)]
    return max(new, default=None)
