"""A worker of the process world: what `offbeat train` runs on every rank, over `attach` like any user."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offbeat.attach import Sync, attach
from offbeat.core.ledger import Span, WorkerTotals
from offbeat.core.pending import block_on
from offbeat.core.session import arrival_lag, wait_for_all
from offbeat.core.units import parse_rate
from offbeat.experiments import trace
from offbeat.experiments.loop import Callback, Evaluation, Job, Worker, train
from offbeat.experiments.tasks import Batch, Task
from offbeat.worlds.processes.emulation import Emulation
from offbeat.worlds.processes.metrics_store import MetricsStore


class ProcessWorker(Worker):
    def __init__(
        self, sync: Sync, task: Task, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self.port = sync.port
        self.rank = sync.port.rank
        self.model = model
        self.metrics_store = MetricsStore(sync.port.failures.store, self.rank, sync.port.world)
        self._sync = sync
        self._task = task
        self._optimizer = optimizer
        self._device = next(model.parameters()).device

    @property
    def seconds(self) -> float:
        return self._sync.seconds

    async def backward(self, batch: Batch) -> Tensor:
        self._optimizer.zero_grad()
        self._sync.samples(len(batch[0]))
        loss = self._task.loss(self.model, batch)
        self._sync.loss(loss)
        loss.backward()
        return loss.detach()

    async def update(self) -> None:
        self._optimizer.step()
        self.metrics_store.post(self._sync.metrics)

    @asynccontextmanager
    async def consensus(self, alone: bool) -> AsyncIterator[None]:
        came_s, late_s = time.monotonic(), 0.0
        with self._sync.consensus(alone=alone):
            if not alone:
                late_s = await arrival_lag(self._sync.port, self._device, time.monotonic, came_s)
            yield
            time.sleep(late_s)

    async def meet(self) -> None:
        await wait_for_all(self._sync.port, self._device)

    async def entries(self, alone: bool) -> list[WorkerTotals]:
        if alone:
            return self.metrics_store.latest()
        mine = self._sync.metrics
        return [WorkerTotals(**entry) for entry in self._collect(asdict(mine))] or [mine]

    def timeline(self) -> list[list[Span]]:
        """The spans of all ranks, at rank 0."""
        mine = list(self._sync.port.ledger.spans or ())
        return [[Span(*span) for span in spans] for spans in self._collect(mine)]

    def _collect(self, mine: Any) -> list[Any]:
        return self.metrics_store.gather_json(mine, self._sync.port.timeout_s)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where a job runs and what is pretended about it."""

    data: Path | None = None
    device: str = "cpu"
    timeout_s: float = 300.0
    trace: Path | None = None
    emulation: Emulation = field(default_factory=Emulation)

    @property
    def bits_per_s(self) -> float | None:
        return parse_rate(self.emulation.bandwidth) if self.emulation.bandwidth else None


def run(job: Job, place: RunOptions, watchers: Callable[[ProcessWorker], list[Callback]]) -> list[Evaluation]:
    """One rank's whole part in a job."""
    device = torch.device(place.device)
    data = job.task.load(place.data).to(device)
    torch.manual_seed(job.seed)
    model = job.task.build().to(device)
    optimizer = job.task.optimizer(model)
    bandwidth = place.emulation.bandwidth
    with attach(
        model,
        optimizer,
        job.strategy,
        timeout_s=place.timeout_s,
        bandwidth=bandwidth,
        steps_per_epoch=job.steps_per_epoch(len(data)),
    ) as sync:
        worker = ProcessWorker(sync, job.task, model, optimizer)
        place.emulation.apply(model, worker.rank)
        sync.port.ledger.spans = deque(maxlen=trace.EXCERPT_SPANS) if place.trace is None else []
        seen = watchers(worker)
        history = block_on(train(job, worker, data, seen))
        timeline = worker.timeline()
        if place.trace is not None and timeline:
            trace.write(place.trace, timeline)
        for watcher in seen:
            watcher.ended(timeline)
        return history
