"""Elastic runs in virtual time: any worker may die, so all evaluate, and whoever is there reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.core.ledger import Ledger, WorkerTotals
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback, Evaluation, Worker, train
from offbeat.experiments.tasks import Data
from offbeat.experiments.virtual_worker import VirtualWorker
from offbeat.worlds.virtual.cluster import Cluster
from offbeat.worlds.virtual.elastic.crew import run_elastic_workers
from offbeat.worlds.virtual.elastic.session import ElasticVirtualSession


class ElasticVirtualWorker(VirtualWorker):
    """A worker whose process may have begun after others."""

    evaluates = True

    def __init__(
        self, session: ElasticVirtualSession, ledgers: list[Ledger], history: list[Evaluation]
    ) -> None:
        super().__init__(session, ledgers)
        self._joined = session
        self._ledgers = ledgers
        self._kept = history

    @property
    def clock(self) -> int:
        return self._joined.clock

    def earlier_evaluations(self) -> list[Evaluation]:
        return [evaluation for evaluation in self._kept if evaluation.step <= self.clock]


class Reports:
    """The callbacks of a run, called for each event once, whichever worker is there to tell."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = callbacks
        self.history: list[Evaluation] = []
        self._told: dict[str, int] = {}  # the last step of which each kind of event was told

    def is_new(self, event: str, step: int) -> bool:
        """Return whether nobody has told of this step yet; the caller then does."""
        new = step > self._told.get(event, -1)
        if new:
            self._told[event] = step
        return new


class Reporter(Callback):
    """One process's part in the reports. Steps are those of the first of the roster."""

    def __init__(self, reports: Reports) -> None:
        self._reports = reports

    def started(self, job: Job, total_steps: int) -> None:
        if self._reports.is_new("started", 0):
            for callback in self._reports.callbacks:
                callback.started(job, total_steps)

    def stepped(self, step: int, loss: Tensor, worker: Worker) -> None:
        if worker.port.rank == 0 and self._reports.is_new("stepped", step):
            for callback in self._reports.callbacks:
                callback.stepped(step, loss, worker)

    def published(self, step: int, model: nn.Module) -> None:
        if self._reports.is_new("published", step):
            for callback in self._reports.callbacks:
                callback.published(step, model)

    def evaluated(self, history: list[Evaluation], worker_totals: list[WorkerTotals]) -> None:
        if self._reports.is_new("evaluated", history[-1].step):
            self._reports.history = list(history)
            for callback in self._reports.callbacks:
                callback.evaluated(history, worker_totals)


def simulate_elastic(
    job: Job,
    cluster: Cluster,
    data: Data,
    build: Callable[[int], tuple[nn.Module, Optimizer]],
    make_callbacks: Callable[[list[Ledger]], Sequence[Callback]],
    minimum: int,
    **options: Any,
) -> list[Evaluation]:
    """Train a job whose workers may be lost; return the evaluations, in virtual seconds."""
    ledgers: list[Ledger] = []
    reports = Reports(())

    def on_start(of_workers: list[Ledger]) -> None:
        ledgers.extend(of_workers)
        reports.callbacks = make_callbacks(ledgers)

    async def run(session: ElasticVirtualSession) -> list[Evaluation]:
        worker = ElasticVirtualWorker(session, ledgers, reports.history)
        return await train(job, worker, data, [Reporter(reports)])

    try:
        run_elastic_workers(
            job.workers,
            cluster,
            job.strategy,
            build,
            job.task.gradient,
            run,
            minimum=minimum,
            on_start=on_start,
            **options,
        )
    finally:
        for callback in reports.callbacks:
            callback.closed()
    return reports.history
