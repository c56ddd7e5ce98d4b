"""A worker in virtual time, as the training loop sees it."""

from __future__ import annotations

from torch import Tensor

from offbeat.data.work import Claims
from offbeat.experiments.loop import Worker
from offbeat.experiments.tasks import Batch
from offbeat.experiments.tasks.base import count_samples
from offbeat.worlds.virtual.looking import Look
from offbeat.worlds.virtual.session import VirtualSession


class VirtualWorker(Worker):
    """A virtual session, as the training loop sees it."""

    def __init__(self, session: VirtualSession, claims: Claims | None = None) -> None:
        self.rank = session.rank
        self.model = session.model
        self.optimizers = session.optimizers
        self.port = session.port
        self._session = session
        self._claims = claims  # on the batches that all workers share

    @property
    def seconds(self) -> float:
        return self._session.seconds

    async def backward(self, batch: Batch) -> Tensor:
        return await self._session.backward(batch, samples=count_samples(batch))

    async def update(self) -> None:
        await self._session.update()

    async def look(self, look: Look, alone: bool, last: bool) -> None:
        await self._session.look(look, alone=alone, wait=last)

    async def finish(self) -> None:
        await self._session.finish()

    def share(self, batches: int) -> Claims:
        return self._claims or super().share(batches)
