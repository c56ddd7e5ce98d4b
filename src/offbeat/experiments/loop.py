"""train: the one training loop of both worlds.

It is a coroutine, like a strategy. Over processes nothing in it ever suspends: operations block, as in a
user's own loop. In virtual time it suspends wherever time passes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.core.ledger import Span, WorkerTotals
from offbeat.core.settings import lookup
from offbeat.core.strategy import Strategy
from offbeat.data.batching import batches, steps_per_epoch
from offbeat.data.injection import CountedPort, DataInjection, check_slices
from offbeat.data.partition import label_skew
from offbeat.data.samplers import SAMPLERS
from offbeat.errors import SettingError
from offbeat.experiments.tasks import Batch, Data, Task

SHUFFLED = "shuffled"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to train, by whom, for how long. The fields that are None come from the task."""

    task: Task
    strategy: Strategy[Any]
    workers: int
    seed: int = 0
    epochs: int | None = None
    steps: int | None = None
    evaluate_every: int | None = None  # steps; None: once an epoch
    target: float | None = None
    order: str = SHUFFLED  # who draws which samples: all dealt out anew each epoch, or by a sampler
    skew: int | None = None  # classes a worker's chunk holds; None: chunks are random
    inject: tuple[float, float] | None = None  # α and β of data injection

    def __post_init__(self) -> None:
        for name in ("workers", "epochs", "steps", "evaluate_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingError(f"{name}={value}: at least 1 is needed")

        if self.target is not None and not math.isfinite(self.target):
            raise SettingError(f"target={self.target}: a finite number is needed")
        if abs(self.seed) >= 1 << 63:
            raise SettingError(f"seed={self.seed}: a number of at most 63 bits is needed")
        lookup("order", self.order, {SHUFFLED: None, **SAMPLERS})
        if self.skew is not None and self.order == SHUFFLED:
            raise SettingError("skewed chunks need a data order that has chunks: seldp or defdp")
        if self.inject is not None:
            check_slices(*self.inject)

    def total_steps(self, samples: int) -> int:
        epochs = self.epochs or self.task.epochs
        return self.steps or epochs * self.steps_per_epoch(samples)

    def steps_per_epoch(self, samples: int) -> int:
        """Return the steps of one worker per epoch."""
        return steps_per_epoch(samples, self.workers, self.task.batch_size)

    def batches(self, data: Data, rank: int, batch_size: int) -> Iterator[Tensor]:
        """The indices of a worker's batches, without end."""
        if self.inject is not None and data.lengths is not None:
            raise SettingError(f"{self.task.name} has samples of differing lengths, which cannot be injected")
        if self.order == SHUFFLED:
            return batches(len(data), rank, self.workers, batch_size, self.seed, data.lengths)
        shards = None
        if self.skew is not None:
            if data.labels is None:
                raise SettingError(f"{self.task.name} has no classes to skew its samples by")
            shards = label_skew(data.labels, self.workers, self.skew, self.seed)
        sampler = SAMPLERS[self.order](data, rank, self.workers, self.seed, shards)
        return sampler.batches(batch_size, data.lengths)


@dataclass(frozen=True)
class Evaluation:
    """An evaluation in the course of training."""

    step: int
    seconds: float
    loss: float
    value: float
    bytes_sent: int = 0  # by all workers until then, or as far as they have posted it
    also: dict[str, float] = field(default_factory=dict)  # further yardsticks of the task


class Worker(ABC):
    """One worker as the loop sees it, in either world."""

    rank: int
    model: nn.Module
    port: CountedPort

    @property
    @abstractmethod
    def seconds(self) -> float:
        """Training time so far."""

    @abstractmethod
    async def backward(self, batch: Batch) -> Tensor:
        """Forward and backward of one batch; the loss, detached."""

    @abstractmethod
    async def update(self) -> None:
        """The optimizer's step."""

    @abstractmethod
    def consensus(self, alone: bool) -> AbstractAsyncContextManager[None]:
        """Inside, all workers (or this one alone) hold the model to evaluate, and no time is counted.

        Workers that come early wait for the others; on leaving, each is again as far ahead as it was, so
        that an evaluation changes nothing of what is measured.
        """

    @abstractmethod
    async def meet(self) -> None:
        """Wait until all workers are here."""

    @abstractmethod
    async def entries(self, alone: bool) -> list[WorkerTotals]:
        """The totals of all workers, at worker 0; elsewhere at least its own. Alone: as they were posted."""


class Callback:
    """Sees a run of worker 0 go by. Does nothing by itself."""

    def started(self, job: Job, total_steps: int) -> None: ...
    def stepped(self, step: int, loss: Tensor, worker: Worker) -> None: ...
    def evaluated(self, history: list[Evaluation], entries: list[WorkerTotals]) -> None: ...
    def closed(self) -> None: ...
    def ended(self, timeline: list[list[Span]]) -> None: ...  # what each worker did in the end


async def train(job: Job, worker: Worker, data: Data, watchers: Sequence[Callback] = ()) -> list[Evaluation]:
    """Train; the history of evaluations, the last one after the last step."""
    try:
        return await _train(job, worker, data, watchers)
    finally:
        for watcher in watchers:
            watcher.closed()


async def _train(job: Job, worker: Worker, data: Data, watchers: Sequence[Callback]) -> list[Evaluation]:
    task, model = job.task, worker.model
    total = job.total_steps(len(data))
    every = job.evaluate_every or job.steps_per_epoch(len(data))
    injection = DataInjection(worker, *job.inject, job.seed) if job.inject else None
    batch_size = injection.local_batch_size(task.batch_size) if injection else task.batch_size
    order = job.batches(data, worker.rank, batch_size)
    history: list[Evaluation] = []
    losses: list[Tensor] = []  # worker 0's since the last evaluation; reading them earlier would stall a GPU
    for watcher in watchers:
        watcher.started(job, total)
    for step in range(1, total + 1):
        batch = data.batch(next(order))
        if injection is not None:
            batch = await injection.mix(batch)
        seed_step(job.seed, worker.rank, step)
        loss = await worker.backward(batch)
        if worker.rank == 0:  # ten thousand virtual workers would keep a million
            losses.append(loss)
        task.clip(model)
        await worker.update()
        for watcher in watchers:
            watcher.stepped(step, loss, worker)
        if step % every == 0 or step == total:
            mean_loss = torch.stack(losses).mean().item() if losses else 0.0
            losses.clear()
            # A server holds the model, so worker 0 can look at it alone: stopping all would tame stragglers.
            alone = step < total and job.strategy.server_half() is not None
            if alone and worker.rank:
                continue
            async with worker.consensus(alone):
                value = task.evaluate(model, data) if worker.rank == 0 else 0.0
                also = task.also(model, data) if worker.rank == 0 else {}
                if not alone:
                    await worker.meet()
                entries = await worker.entries(alone)
            # A step is done when the slowest worker has done it.
            seconds = worker.seconds if alone else max(entry.seconds for entry in entries)
            sent = sum(entry.bytes_sent for entry in entries)
            history.append(Evaluation(step, seconds, mean_loss, value, sent, also))
            for watcher in watchers:
                watcher.evaluated(history, entries)
    return history


def seed_step(seed: int, rank: int, step: int) -> None:
    """Make the random draws of a step (dropout, noise) depend on nothing but these three.

    So they are the same in both worlds and after a restart, whoever else draws in between.
    """
    value = (seed * 1_000_003 + rank) * 1_000_003 + step
    torch.default_generator.manual_seed(value % (1 << 63))
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(value % (1 << 63))
