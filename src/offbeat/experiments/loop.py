"""The training loop of both worlds, its interface to a worker, and callbacks.

`train` is a coroutine, like a strategy. Over processes nothing in it ever suspends: operations block, as in a
user's own loop. In virtual time it suspends wherever time passes.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from offbeat.core.ledger import Span, WorkerTotals
from offbeat.core.port import CollectivePort
from offbeat.data.injection import DataInjection
from offbeat.data.work import Claims
from offbeat.errors import SettingError
from offbeat.experiments.job import Job
from offbeat.experiments.schedule import set_rates
from offbeat.experiments.tasks import Batch, Data, Task

log = logging.getLogger("offbeat")
REPLICA_VALUE = "replica_value"  # metric of worker 0's own weights, where the published mean is nobody's


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of the model during training."""

    step: int
    seconds: float
    loss: float
    value: float
    bytes_sent: int = 0  # by all workers so far, as far as their totals are known
    extra_metrics: dict[str, float] = field(default_factory=dict)  # further metrics of the task
    bytes_server: int = 0  # as bytes_sent, by a server on machines of its own

    @property
    def bytes_total(self) -> int:
        """Bytes that workers and server sent."""
        return self.bytes_sent + self.bytes_server

    def to_json(self) -> dict[str, Any]:
        """Return the entry of `history` in summary.json, whose keys are never renamed."""
        known = asdict(self) | {"bytes_total": self.bytes_total}
        known["also"] = known.pop("extra_metrics")
        return known

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Evaluation:
        """Return the evaluation of an entry of `history`."""
        known = {key: value for key, value in entry.items() if key != "bytes_total"}
        return cls(extra_metrics=known.pop("also"), **known)


class Worker(ABC):
    """Interface of the loop to one worker, in either world."""

    rank: int
    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    port: CollectivePort

    @property
    def clock(self) -> int:
        """Steps of the training before this worker joined."""
        return 0

    @property
    def evaluates(self) -> bool:
        """True if this worker evaluates the model: worker 0, or all where any of them may die."""
        return self.rank == 0

    def earlier_evaluations(self) -> list[Evaluation]:
        """Return the evaluations before this worker joined."""
        return []

    def evaluate(self, task: Task, data: Data) -> tuple[float, dict[str, float]]:
        """Return the task's metric of the model as it is now, and its further metrics."""
        return task.evaluate(self.model, data), task.extra_metrics(self.model, data)

    @property
    @abstractmethod
    def seconds(self) -> float:
        """Training time so far."""

    def training_seconds(self, totals: Sequence[WorkerTotals]) -> float:
        """Return the training time of the slowest of these workers."""
        return max(each.seconds for each in totals)

    def sent_bytes(self, totals: Sequence[WorkerTotals]) -> tuple[int, int]:
        """Return the bytes that these workers sent, and those that a server sent to them."""
        return sum(each.bytes_sent for each in totals), sum(each.bytes_server for each in totals)

    @abstractmethod
    async def backward(self, batch: Batch) -> Tensor:
        """Run forward and backward of one batch and return the detached loss."""

    @abstractmethod
    async def update(self) -> None:
        """Run the step of each optimizer."""

    @abstractmethod
    async def look(self, look: Callable[[list[WorkerTotals]], None], alone: bool, last: bool) -> None:
        """Call `look` while the model holds the weights to evaluate, with the totals of the workers.

        No time is counted, and an evaluation changes no measurement. All workers call this, or with `alone`
        this one, which then gets the totals that the others published last. `look` may be called later, when
        the slowest worker has come to this step; the `last` one before this method returns.
        """

    @abstractmethod
    async def finish(self) -> None:
        """End training: wait for everything in flight, which belongs to training and counts.

        From now on no other worker waits for this one's next step.
        """

    def share(self, batches: int) -> Claims:
        """Return this worker's claims on batches that all workers share."""
        raise SettingError("these workers have no counter to share batches by: choose equal work")


class Callback:
    """An observer of a run at one worker, in most cases worker 0. Every method does nothing by default."""

    def started(self, job: Job, total_steps: int) -> None:
        """Called before the first step."""

    def stepped(self, step: int, loss: Tensor, worker: Worker) -> None:
        """Called after every step of this worker.

        Where work is shared, `step` is that of the batch: the common progress, which never decreases.
        """

    def published(self, step: int, model: nn.Module) -> None:
        """Called at every evaluation, while `model` holds the weights that are evaluated."""

    def evaluated(self, history: list[Evaluation], worker_totals: list[WorkerTotals]) -> None:
        """Called after every evaluation; the newest is the last of `history`."""

    def closed(self) -> None:
        """Called when the loop ends, also by an error or an interrupt."""

    def ended(self, timeline: list[list[Span]]) -> None:
        """Called after a complete run with the spans of each worker."""


class CallbackFactory(Protocol):
    """A picklable function that makes the callbacks of worker 0 in the process that trains it.

    latest  returns the totals that the workers published last
    hosts   returns the host name of each rank, where ranks run on hosts
    """

    def __call__(
        self, latest: Callable[[], list[WorkerTotals]], hosts: Callable[[], dict[int, str]] = dict
    ) -> list[Callback]: ...


async def train(job: Job, worker: Worker, data: Data, callbacks: Sequence[Callback] = ()) -> list[Evaluation]:
    """Train and return the history of evaluations; the last one follows the last step."""
    try:
        return await _train(job, worker, data, callbacks)
    finally:
        for callback in callbacks:
            callback.closed()


async def _train(job: Job, worker: Worker, data: Data, callbacks: Sequence[Callback]) -> list[Evaluation]:
    task, model = job.task, worker.model
    total, begin = job.total_steps(len(data)), worker.clock
    every = job.evaluate_every or job.steps_per_epoch(len(data))
    due = begin - begin % every + every  # the step after which the next evaluation comes
    injection = DataInjection(worker, *job.inject, job.seed) if job.inject else None
    batch_size = injection.local_batch_size(task.batch_size) if injection else task.batch_size
    parts = _claimed(job, worker, data, total) if job.shares_work else _own(job, worker, data, batch_size)
    history = worker.earlier_evaluations()
    losses: list[Tensor] = []  # since the last evaluation; reading them earlier would stall a GPU
    for callback in callbacks:
        callback.started(job, total)
    for part in parts:
        set_rates(worker.optimizers, job.schedule, part.step, total)
        seed_step(job.seed, part.rank, part.step)  # before the batch: a user's data set may draw random crops
        batch = data.batch(part.samples)
        if injection is not None:
            batch = await injection.mix(batch)
            seed_step(job.seed, part.rank, part.step)  # meanwhile other virtual workers have drawn
        loss = await worker.backward(batch)
        if worker.evaluates:  # ten thousand virtual workers would hold a million losses
            losses.append(loss)
        task.clip(model)
        await worker.update()
        for callback in callbacks:
            callback.stepped(part.step, loss, worker)
        if passed := range(due, min(part.step + 1, total), every):
            due = passed[-1] + every
            # A server holds the model, so worker 0 can evaluate alone: to meet would hide stragglers. Workers
            # that inject data meet in each step anyway.
            alone = job.strategy.server_half() is not None and injection is None
            if not alone or worker.rank == 0:
                evaluate = _Evaluate(job, worker, data, history, callbacks, passed, losses, alone)
                await worker.look(evaluate, alone, last=False)
            losses = []
    if begin < total:
        await worker.finish()
        steps = [*range(due, total, every), total]
        await worker.look(_Evaluate(job, worker, data, history, callbacks, steps, losses, False), False, True)
    return history


class _Part(NamedTuple):
    """One batch of a worker, and the step and the rank that it would belong to if work were equal."""

    step: int
    rank: int
    samples: Tensor


def _own(job: Job, worker: Worker, data: Data, batch_size: int) -> Iterator[_Part]:
    """Yield this worker's batch of each step."""
    order = islice(job.batches(data, worker.rank, batch_size), worker.clock, None)
    for step in range(worker.clock + 1, job.total_steps(len(data)) + 1):
        yield _Part(step, worker.rank, next(order))


def _claimed(job: Job, worker: Worker, data: Data, total: int) -> Iterator[_Part]:
    """Yield the batches that this worker claims, until none is left."""
    batches, claims = job.numbered_batches(data), worker.share(total * job.workers)
    while (number := claims.claim()) is not None:
        step, rank = divmod(number, job.workers)
        yield _Part(step + 1, rank, batches[number])


class _Evaluate:
    """An evaluation, called while the model holds the weights to evaluate.

    It is the first since any of `steps`: where work is shared, a slow worker 0 may come past several of them
    in one of its own steps. Each gets an entry, so curves of all runs have the same steps.
    """

    def __init__(
        self,
        job: Job,
        worker: Worker,
        data: Data,
        history: list[Evaluation],
        callbacks: Sequence[Callback],
        steps: Sequence[int],
        losses: list[Tensor],
        alone: bool,
    ) -> None:
        self._job, self._worker, self._data = job, worker, data
        self._history, self._callbacks = history, callbacks
        self._steps, self._losses, self._alone = steps, losses, alone
        diverged = worker.evaluates and bool(worker.port.ledger.gauges.get("diverged"))
        self._own = copy_state(worker.model) if diverged else None

    def __call__(self, worker_totals: list[WorkerTotals]) -> None:
        task, worker, model = self._job.task, self._worker, self._worker.model
        value, extra_metrics = worker.evaluate(task, self._data) if worker.evaluates else (0.0, {})
        for callback in self._callbacks:
            callback.published(self._steps[-1], model)
        if self._own is not None:
            own_value = evaluate_state(task, model, self._own, self._data)
            extra_metrics = {**extra_metrics, REPLICA_VALUE: own_value}
        if self._job.shares_work and not self._alone and worker.rank == 0:
            self._check_all_trained(worker_totals)
        loss = torch.stack(self._losses).mean().item() if self._losses else 0.0
        # A step is done when the slowest worker has done it.
        seconds = worker.seconds if self._alone else worker.training_seconds(worker_totals)
        sent, server = worker.sent_bytes(worker_totals)
        for step in self._steps:
            self._history.append(Evaluation(step, seconds, loss, value, sent, extra_metrics, server))
            for callback in self._callbacks:
                callback.evaluated(self._history, worker_totals)

    def _check_all_trained(self, worker_totals: list[WorkerTotals]) -> None:
        """Warn if a claim got lost: a store that is reached again may have counted it twice."""
        batches = self._steps[-1] * self._job.workers
        trained = sum(totals.steps for totals in worker_totals)
        if trained < batches:
            log.warning("only %d of %d batches were trained: the others' claims got lost", trained, batches)


def copy_state(model: nn.Module) -> dict[str, Any]:
    """Return a copy of the model's weights and buffers."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def evaluate_state(task: Task, model: nn.Module, state: dict[str, Any], data: Data) -> float:
    """Evaluate the model with another state, and give it its own back."""
    before = copy_state(model)
    model.load_state_dict(state)
    try:
        return task.evaluate(model, data)
    finally:
        model.load_state_dict(before)


def seed_step(seed: int, rank: int, step: int) -> None:
    """Seed torch's generators by run, worker and step, so that dropout and noise depend on nothing else.

    The draws are then the same in both worlds and after a restart, whatever else draws in between.
    """
    value = (seed * 1_000_003 + rank) * 1_000_003 + step
    torch.default_generator.manual_seed(value % (1 << 63))
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(value % (1 << 63))
