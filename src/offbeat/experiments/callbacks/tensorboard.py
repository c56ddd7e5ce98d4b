"""Curves of a run as TensorBoard event files, by torch's own writer (which needs the package tensorboard)."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from offbeat.core.ledger import WorkerTotals
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback, Evaluation, Worker


class TensorBoard(Callback):
    """Writer of a run's curves into a folder for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))
        self._metric = "evaluation/value"

    def started(self, job: Job, total_steps: int) -> None:
        self._metric = f"evaluation/{job.task.metric}"
        run = f"{job.strategy!r} on {job.task.name}, {job.workers} workers, seed {job.seed}"
        self._writer.add_text("run", run)

    def stepped(self, step: int, loss: Tensor, worker: Worker) -> None:
        now = worker.port.ledger.totals()
        self._add("training/loss", loss.item(), step)
        self._add("rank 0/seconds", now.seconds, step)
        self._add("rank 0/fraction of time waiting", now.wait_s / max(now.seconds, 1e-9), step)
        self._add("rank 0/synchronized steps", now.sync_steps, step)
        self._add("rank 0/bytes sent", now.bytes_sent, step)

    def evaluated(self, history: list[Evaluation], worker_totals: list[WorkerTotals]) -> None:
        last = history[-1]
        self._add(self._metric, last.value, last.step)
        self._add("all/bytes sent", last.bytes_total, last.step)
        for worker in worker_totals:
            self._add(f"staleness/rank {worker.rank}", worker.staleness_mean, last.step)
            self._add(
                f"compute seconds per step/rank {worker.rank}",
                worker.compute_s / max(worker.steps, 1),
                last.step,
            )

    def closed(self) -> None:
        self._writer.close()

    def _add(self, name: str, value: float, step: int) -> None:
        self._writer.add_scalar(name, value, step)
