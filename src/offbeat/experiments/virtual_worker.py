"""A worker in virtual time, as the training loop sees it."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from torch import Tensor

from offbeat.core.ledger import Ledger, WorkerTotals
from offbeat.experiments.loop import Worker
from offbeat.experiments.tasks import Batch
from offbeat.experiments.tasks.base import count_samples
from offbeat.worlds.virtual.session import VirtualSession


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
        return await self._session.backward(batch, samples=count_samples(batch))

    async def update(self) -> None:
        await self._session.update()

    def consensus(self, alone: bool) -> AbstractAsyncContextManager[None]:
        return self._session.consensus(alone)

    async def wait_for_all(self) -> None:
        await self._session.wait_for_all()

    async def worker_totals(self, alone: bool) -> list[WorkerTotals]:
        return [ledger.totals() for ledger in self._ledgers]
