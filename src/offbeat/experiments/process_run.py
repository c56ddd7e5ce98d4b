"""Runs over real processes: a job on this rank, attached like a user's loop, or on new local ranks."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
from offbeat.data.work import AHEAD_LEFT, Claims, ClaimsAhead
from offbeat.errors import SettingError
from offbeat.experiments import timeline, trace
from offbeat.experiments.callbacks.recorder import Recorder
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback, CallbackFactory, Evaluation, Worker, train
from offbeat.experiments.summary import Summary
from offbeat.experiments.tasks import Batch, Task
from offbeat.experiments.tasks.base import count_samples
from offbeat.worlds.processes.elastic.launcher import launch_elastic
from offbeat.worlds.processes.emulation import Emulation
from offbeat.worlds.processes.launcher import launch, workers_of_environment
from offbeat.worlds.processes.metrics_store import MetricsStore
from offbeat.worlds.processes.server.transport import refusals
from offbeat.worlds.processes.store import DeadlineStore


class ProcessWorker(Worker):
    """A worker that is a process of its own, attached like a user's loop."""

    def __init__(
        self, sync: Sync, task: Task, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]
    ) -> None:
        self._sync = sync
        self.port = sync.port
        self.rank = sync.port.ledger.rank  # stays, also where the roster changes
        self.model = model
        self.metrics_store = MetricsStore(sync.port.failures.store, self.rank, self._workers)
        self._task = task
        self.optimizers = optimizers
        self._device = next(model.parameters()).device
        self._claims: ClaimsAhead | None = None  # where work is shared

    @property
    def _workers(self) -> int:
        return self._sync.port.world

    @property
    def seconds(self) -> float:
        return self._sync.seconds

    async def backward(self, batch: Batch) -> Tensor:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self._sync.samples(count_samples(batch))
        ledger, began_s = self._sync.port.ledger, time.monotonic()
        loss = self._task.loss(self.model, batch)
        ledger.record_span("forward", "", began_s)
        self._sync.loss(loss)
        began_s = time.monotonic()
        loss.backward()
        ledger.record_span("backward", "", began_s)
        return loss.detach()

    async def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.metrics_store.post(self._sync.metrics)

    async def look(self, look: Callable[[list[WorkerTotals]], None], alone: bool, last: bool) -> None:
        arrived_s, lag_s = time.monotonic(), 0.0
        with self._others_held() if alone else nullcontext(), self._sync.consensus(alone=alone):
            if not alone:
                lag_s = await arrival_lag(self._sync.port, self._device, time.monotonic, arrived_s)
            look(await self.worker_totals(alone))
            if not alone:
                await wait_for_all(self._sync.port, self._device)
            time.sleep(lag_s)  # leave as far behind the others as this worker came

    @contextmanager
    def _others_held(self) -> Iterator[None]:
        """Stop this worker's clock and all others, with theirs: nobody may gain by an evaluation, or lose."""
        assert self._sync.port.client is not None
        with self._sync.port.ledger.paused(), self._sync.port.client.looking():
            yield

    async def finish(self) -> None:
        self._sync.settle()
        # A rule may let others wait for this one's clock. The last of them stays: a server ends with it.
        if self._claims and self._sync.port.client and not self._sync.port.failures.arrive("end of work"):
            self._sync.port.client.leave()

    def share(self, batches: int) -> Claims:
        store = DeadlineStore.of(self._sync.port.failures.store, self._sync.port.timeout_s).prefixed("work")
        self._claims = ClaimsAhead(lambda: store.add("next", 1) - 1, batches, AHEAD_LEFT * self._workers)
        return self._claims

    async def worker_totals(self, alone: bool) -> list[WorkerTotals]:
        """Return the totals of all workers at worker 0, and at least its own at the others.

        With `alone`, wait for no worker: return the totals that the workers published last.
        """
        if alone:
            return self.metrics_store.latest()
        own = self._sync.metrics
        return [WorkerTotals(**totals) for totals in self._collect(asdict(own))] or [own]

    def timeline(self) -> list[list[Span]]:
        """Return the spans of all ranks at rank 0, an empty list elsewhere."""
        own = list(self._sync.port.ledger.spans or ())
        return [[Span(*span) for span in spans] for spans in self._collect(own)]

    def _collect(self, own: Any) -> list[Any]:
        return self.metrics_store.gather_json(own, self._sync.port.timeout_s)


class ElasticWorker(ProcessWorker):
    """A worker that waits for no totals of others, for some may never come, and can do what any of them did.

    All evaluate, and the first of the roster records: whichever dies, the history and the summary go on.
    """

    evaluates = True
    HISTORY = "history"  # in the store

    @property
    def leads(self) -> bool:
        """True if this worker is the first of the roster."""
        return self.port.rank == 0

    @property
    def _workers(self) -> int:
        return workers_of_environment()  # as many as were started, whoever is there now

    @property
    def clock(self) -> int:
        return self._sync.clock

    def earlier_evaluations(self) -> list[Evaluation]:
        kept = self.metrics_store.get_json(self.HISTORY) or [] if self.clock else []
        return [Evaluation.from_json(entry) for entry in kept]

    def keep(self, history: list[Evaluation]) -> None:
        """Keep the evaluations for workers that join later."""
        self.metrics_store.set_json(self.HISTORY, [evaluation.to_json() for evaluation in history])

    async def worker_totals(self, alone: bool) -> list[WorkerTotals]:
        self.metrics_store.post(self._sync.metrics, at_once=True)
        await wait_for_all(self.port, self._device)
        return self.metrics_store.latest()

    def timeline(self) -> list[list[Span]]:
        """Return the spans of this rank at the first of the roster, an empty list elsewhere."""
        return [list(self._sync.port.ledger.spans or ())] if self.leads else []


class KeepHistory(Callback):
    """The evaluations, kept for workers that join later."""

    def __init__(self, worker: ElasticWorker) -> None:
        self._worker = worker

    def evaluated(self, history: list[Evaluation], worker_totals: list[WorkerTotals]) -> None:
        self._worker.keep(history)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a job over processes: data, device, timeout, trace and emulation."""

    data: Path | None = None
    device: str = "cpu"
    timeout_s: float = 300.0
    trace: Path | None = None
    emulation: Emulation = field(default_factory=Emulation)
    insecure: bool = False  # whether connections to a server on other hosts are not encrypted
    elastic: bool = False
    minimum: int = 1
    restarts: int = 3

    def check(self, job: Job) -> None:
        """Raise an error if the job cannot be elastic, before processes start."""
        if not self.elastic:
            return
        job.check_elastic(self.minimum)
        if self.emulation.bandwidth:
            raise SettingError("an emulated bandwidth has no failures: not with elastic workers")

    @property
    def bits_per_s(self) -> float | None:
        return parse_rate(self.emulation.bandwidth) if self.emulation.bandwidth else None


def run(
    job: Job, options: RunOptions, make_callbacks: Callable[[ProcessWorker], list[Callback]]
) -> list[Evaluation]:
    """Run this rank's part of a job, and return the history of evaluations."""
    device = torch.device(options.device)
    data = job.task.load(options.data).to(device)
    torch.manual_seed(job.seed)
    model = job.task.build().to(device)
    optimizers = job.task.optimizers(model)
    bandwidth = options.emulation.bandwidth
    with attach(
        model,
        optimizers,
        job.strategy,
        timeout_s=options.timeout_s,
        bandwidth=bandwidth,
        steps_per_epoch=job.steps_per_epoch(len(data)),
        insecure=options.insecure,
        elastic=options.elastic,
        minimum=options.minimum,
    ) as sync:
        make_worker = ElasticWorker if options.elastic else ProcessWorker
        worker = make_worker(sync, job.task, model, optimizers)
        options.emulation.apply(model, worker.rank)
        if not options.elastic:
            # On a slow link the first weights reach one rank long after another: all begin at once.
            with sync.port.ledger.paused():
                block_on(wait_for_all(sync.port, device))
        sync.port.ledger.spans = deque(maxlen=timeline.EXCERPT_SPANS) if options.trace is None else []
        callbacks = make_callbacks(worker)
        history = block_on(train(job, worker, data, callbacks))
        spans = worker.timeline()
        if options.trace is not None and spans:
            trace.write(options.trace, spans)
        for callback in callbacks:
            callback.ended(spans)
        sync.close(publish=False)  # the last evaluation has shown the model, and nobody reads it any more
        return history


def run_rank(job: Job, options: RunOptions, out: Path, make_callbacks: CallbackFactory) -> None:
    """Run this rank's part of a job; rank 0 writes the summary to `out` and calls the callbacks.

    If workers are elastic, the first of those who are left writes the summary.
    """

    def callbacks_of(worker: ProcessWorker) -> list[Callback]:
        latest, notes = worker.metrics_store.latest, options.emulation.notes()
        callbacks = [] if worker.rank else make_callbacks(latest, worker.metrics_store.hosts)
        if isinstance(worker, ElasticWorker):
            recorder = Recorder(job, "processes", out, latest, lambda: worker.leads, emulated=notes)
            return [KeepHistory(worker), recorder, *callbacks]
        return [] if worker.rank else [Recorder(job, "processes", out, latest, emulated=notes), *callbacks]

    refusals.setLevel(logging.ERROR)  # the run tells at its end how many updates were not used
    run(job, options, callbacks_of)


def train_here(job: Job, options: RunOptions, out: Path, make_callbacks: CallbackFactory) -> Summary:
    """Start the job's workers on this machine, and return the summary that rank 0 has written."""
    if options.elastic:
        launch_elastic(job.workers, options.restarts, run_rank, job, options, out, make_callbacks)
    else:
        launch(job.workers, run_rank, job, options, out, make_callbacks)
    summary: Summary = json.loads((out / "summary.json").read_text())
    return summary
