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
from offbeat.core.port import block_on
from offbeat.core.session import arrival_lag, wait_for_all
from offbeat.experiments import trace
from offbeat.experiments.loop import Callback, Evaluation, Job, Worker, train
from offbeat.experiments.tasks import Batch, Task
from offbeat.worlds.processes.metrics_store import MetricsStore
from offbeat.worlds.processes.pacing import pace, parse_rate, slow


@dataclass(frozen=True, kw_only=True)
class Emulation:
    """What is pretended: a slower network, slower computation, slow ranks. Empty: nothing."""

    bandwidth: str | None = None
    pace_s: float | None = None
    slow: dict[int, float] = field(default_factory=dict)

    def notes(self) -> list[str]:
        """In words, for everything that shows results."""
        notes = []
        if self.bandwidth:
            notes.append(f"emulated: every rank's network is slowed to {self.bandwidth}")
        if self.pace_s:
            notes.append(f"emulated: a step's computation takes at least {1000 * self.pace_s:g} ms")
        notes += [f"emulated: rank {r} computes {f:g} times slower" for r, f in self.slow.items()]
        return notes

    def apply(self, model: torch.nn.Module, rank: int) -> None:
        factor = self.slow.get(rank, 1.0)
        if self.pace_s:
            pace(model, self.pace_s, factor=factor)
        elif factor != 1.0:
            slow(model, factor)


class ProcessWorker(Worker):
    def __init__(
        self, sync: Sync, task: Task, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self.port = sync.port
        self.rank = sync.port.rank
        self.model = model
        self.board = MetricsStore(sync.port.rollcall.store, self.rank, sync.port.world)
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
        self.board.post(self._sync.metrics)

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
            return self.board.latest()
        mine = self._sync.metrics
        return [WorkerTotals(**entry) for entry in self._collect(asdict(mine))] or [mine]

    def timeline(self) -> list[list[Span]]:
        """The spans of all ranks, at rank 0."""
        mine = list(self._sync.port.ledger.spans or ())
        return [[Span(*span) for span in spans] for spans in self._collect(mine)]

    def _collect(self, mine: Any) -> list[Any]:
        return self.board.collect(mine, self._sync.port.timeout_s)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where a job runs and what is pretended about it."""

    data: Path | None = None
    device: str = "cpu"
    timeout_s: float = 300.0
    trace: Path | None = None
    emulation: Emulation = Emulation()

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
