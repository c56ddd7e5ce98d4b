"""A job in virtual time: the training loop of both worlds over virtual sessions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.core.ledger import Ledger, WorkerTotals
from offbeat.experiments.loop import Callback, Evaluation, Job, Worker, train
from offbeat.experiments.tasks import Batch, Data
from offbeat.worlds.virtual.cluster import Cluster
from offbeat.worlds.virtual.session import VirtualSession
from offbeat.worlds.virtual.simulation import run_workers


class VirtualWorker(Worker):
    """A virtual session, as the training loop sees it."""

    def __init__(self, session: VirtualSession, ledgers: list[Ledger]) -> None:
        self.rank = session.rank
        self.model = session.model
        self.port = session.port
        self._session = session
        self._ledgers = ledgers if session.rank == 0 else [session.ledger]

    @property
    def seconds(self) -> float:
        return self._session.seconds

    async def backward(self, batch: Batch) -> Tensor:
        return await self._session.backward(batch, samples=len(batch[0]))

    async def update(self) -> None:
        await self._session.update()

    def consensus(self, alone: bool) -> AbstractAsyncContextManager[None]:
        return self._session.consensus(alone)

    async def meet(self) -> None:
        await self._session.wait_for_all()

    async def entries(self, alone: bool) -> list[WorkerTotals]:
        return [ledger.totals() for ledger in self._ledgers]


def simulate(
    job: Job,
    cluster: Cluster,
    data: Data,
    watchers: Callable[[list[Ledger]], Sequence[Callback]] = lambda ledgers: (),
    device: torch.device | str = "cpu",
) -> list[Evaluation]:
    """Train a job on a virtual cluster; return the evaluations, in virtual seconds."""
    steps_per_epoch = job.steps_per_epoch(len(data))  # raises an error if there are too many workers
    ledgers: list[Ledger] = []
    seen: list[Callback] = []

    def build(rank: int) -> tuple[nn.Module, Optimizer]:
        torch.default_generator.manual_seed(job.seed)  # torch.manual_seed formats three tracebacks per call
        model = job.task.build().to(device)
        return model, job.task.optimizer(model)

    def on_start(sessions: list[VirtualSession]) -> None:
        ledgers.extend(session.ledger for session in sessions)
        seen.extend(watchers(ledgers))

    async def run(session: VirtualSession) -> list[Evaluation]:
        worker = VirtualWorker(session, ledgers)
        return await train(job, worker, data, seen if session.rank == 0 else ())

    histories = run_workers(
        job.workers,
        cluster,
        job.strategy,
        build,
        job.task.gradient,
        run,
        seed=job.seed,
        steps_per_epoch=steps_per_epoch,
        on_start=on_start,
    )
    return histories[0] or []
