"""Elastic runs in virtual time: any worker may die, so all evaluate, and whoever is there reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.core.ledger import Ledger, WorkerTotals
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback, Evaluation, Worker, train
from offbeat.experiments.tasks import Data, Task
from offbeat.experiments.virtual_worker import VirtualWorker
from offbeat.worlds.virtual.cluster import Cluster
from offbeat.worlds.virtual.elastic.crew import run_elastic_workers
from offbeat.worlds.virtual.elastic.session import ElasticVirtualSession


class LatestMetrics:
    """The metrics of the model that was evaluated last. All of a roster publish the same one."""

    def __init__(self) -> None:
        self._model: list[Tensor] = []
        self._metrics: tuple[float, dict[str, float]] = 0.0, {}

    def of(self, task: Task, model: nn.Module, data: Data) -> tuple[float, dict[str, float]]:
        """Return a model's metrics, those of the last one if the models are equal to the bit."""
        state = [*model.parameters(), *model.buffers()]
        if not self._model or not all(map(torch.equal, self._model, state)):
            self._model = [tensor.detach().clone() for tensor in state]
            self._metrics = task.evaluate(model, data), task.extra_metrics(model, data)
        value, extra_metrics = self._metrics
        return value, dict(extra_metrics)


class LatestSums:
    """Sums over the totals that were seen last. All who look at one evaluation see the same list."""

    def __init__(self) -> None:
        self._totals: Sequence[WorkerTotals] = ()
        self.training_s = 0.0
        self.sent_bytes = 0, 0

    def of(self, worker: Worker, totals: Sequence[WorkerTotals]) -> Self:
        """Return these sums for a list of totals, computed by the first worker that has it."""
        if totals is not self._totals:
            self._totals = totals
            self.training_s = Worker.training_seconds(worker, totals)
            self.sent_bytes = Worker.sent_bytes(worker, totals)
        return self


class ElasticVirtualWorker(VirtualWorker):
    """A worker whose process may have begun after others."""

    evaluates = True

    def __init__(
        self,
        session: ElasticVirtualSession,
        history: list[Evaluation],
        metrics: LatestMetrics,
        sums: LatestSums,
    ) -> None:
        super().__init__(session)
        self._joined = session
        self._kept = history
        self._metrics = metrics
        self._sums = sums

    @property
    def clock(self) -> int:
        return self._joined.clock

    def evaluate(self, task: Task, data: Data) -> tuple[float, dict[str, float]]:
        return self._metrics.of(task, self.model, data)

    def training_seconds(self, totals: Sequence[WorkerTotals]) -> float:
        return self._sums.of(self, totals).training_s

    def sent_bytes(self, totals: Sequence[WorkerTotals]) -> tuple[int, int]:
        return self._sums.of(self, totals).sent_bytes

    def earlier_evaluations(self) -> list[Evaluation]:
        return [evaluation for evaluation in self._kept if evaluation.step <= self.clock]


class Reports:
    """The callbacks of a run, and what they were told by whichever worker was there."""

    def __init__(self) -> None:
        self.callbacks: Sequence[Callback] = ()
        self.history: list[Evaluation] = []
        self.started = False
        self.stepped = self.published = 0

    def evaluated(self, history: list[Evaluation], worker_totals: list[WorkerTotals]) -> None:
        """Tell of a history that is longer than the last."""
        if len(history) > len(self.history):
            self.history = list(history)
            for callback in self.callbacks:
                callback.evaluated(history, worker_totals)


class Reporter(Callback):
    """One process's part in the reports: steps are told by the first of the roster."""

    def __init__(self, worker: ElasticVirtualWorker, reports: Reports) -> None:
        self._worker = worker
        self._reports = reports

    @property
    def _leads(self) -> bool:
        return self._worker.port.rank == 0

    def started(self, job: Job, total_steps: int) -> None:
        if not self._reports.started:
            self._reports.started = True
            for callback in self._reports.callbacks:
                callback.started(job, total_steps)

    def stepped(self, step: int, loss: Tensor, worker: Worker) -> None:
        if self._leads and step > self._reports.stepped:
            self._reports.stepped = step
            for callback in self._reports.callbacks:
                callback.stepped(step, loss, worker)

    def published(self, step: int, model: nn.Module) -> None:
        if step > self._reports.published:  # all hold the same model: the first that comes will do
            self._reports.published = step
            for callback in self._reports.callbacks:
                callback.published(step, model)

    def evaluated(self, history: list[Evaluation], worker_totals: list[WorkerTotals]) -> None:
        self._reports.evaluated(history, worker_totals)  # the first that lives comes first, as in the roster


def simulate_elastic(
    job: Job,
    cluster: Cluster,
    data: Data,
    build: Callable[[int], tuple[nn.Module, list[Optimizer]]],
    make_callbacks: Callable[[list[Ledger]], Sequence[Callback]],
    minimum: int,
    **options: Any,
) -> list[Evaluation]:
    """Train a job whose workers may be lost; return the evaluations, in virtual seconds."""
    ledgers: list[Ledger] = []
    reports, metrics, sums = Reports(), LatestMetrics(), LatestSums()

    def on_start(of_workers: list[Ledger]) -> None:
        ledgers.extend(of_workers)
        reports.callbacks = make_callbacks(ledgers)

    async def run(session: ElasticVirtualSession) -> list[Evaluation]:
        worker = ElasticVirtualWorker(session, reports.history, metrics, sums)
        return await train(job, worker, data, [Reporter(worker, reports)])

    try:
        histories = run_elastic_workers(
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
        # The first of the roster may have died before it could tell of the last evaluation.
        longest = max((history for history in histories if history is not None), key=len)
        reports.evaluated(longest, [ledger.totals() for ledger in ledgers])
    finally:
        for callback in reports.callbacks:
            callback.closed()
    return reports.history
