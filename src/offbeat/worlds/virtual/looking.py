"""Evaluations in virtual time: exchanges that take no time, beside those of training.

A worker that comes to an evaluation leaves a copy of what it publishes, and trains on at once. When the last
worker has come, worker 0's function looks at the model of that step. So no worker waits, nothing in flight is
disturbed, and a run is the same, to the last bit, however often it is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from offbeat.core.ledger import Ledger, WorkerTotals
from offbeat.core.port import Lane, ServerPort
from offbeat.core.published import PublishedModel
from offbeat.core.session import Session, wait_for_all
from offbeat.worlds.virtual.collectives import CollectiveQueue
from offbeat.worlds.virtual.port import VirtualPort
from offbeat.worlds.virtual.scheduler import Scheduler

Look = Callable[[list[WorkerTotals]], None]
"""A function that looks at a session's model; its argument is the totals of all workers at that step."""


class Lookout:
    """The evaluations that some workers have come to, and others have not."""

    def __init__(
        self,
        scheduler: Scheduler,
        ledgers: list[Ledger],
        world: int,
        cohorts: Sequence[range] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._ledgers = ledgers  # of training
        self._uncounted = [Ledger(rank, scheduler.clock) for rank in range(world)]  # of evaluations
        for ledger in self._uncounted:
            ledger.stop()  # what they are told does not count, and takes no time
        self._cohorts = cohorts
        self._left: set[int] = set()
        self._come_to = [0] * world  # evaluations, by rank
        self._open: dict[int, _Evaluation] = {}  # by number

    def remove_worker(self, rank: int) -> None:
        """Remove a worker that left for good, so that no evaluation waits for it."""
        self._left.add(rank)
        for evaluation in list(self._open.values()):
            evaluation.queue.remove_worker(rank)

    async def look(
        self, rank: int, session: Session[Any], server: ServerPort | None, look: Look, wait: bool
    ) -> None:
        """Show `look` the model of all workers, at worker 0, once all have come; `wait` until then."""
        self._come_to[rank] += 1
        number = self._come_to[rank]
        evaluation = self._open.get(number)
        if evaluation is None:
            evaluation = self._open[number] = _Evaluation(self._new_queue(), {})
        for member in self._trained_with(rank):
            evaluation.totals[member] = self._ledgers[member].totals()
        port = self._port(session, evaluation.queue, server)

        async def show() -> None:
            model = await session.conductor.publish(port, while_training=True)
            await wait_for_all(port, session.replica.weights[0].device)
            if rank == 0:
                totals = self._open.pop(number).totals
                with shown(model, session):
                    look([totals.get(ledger.rank) or ledger.totals() for ledger in self._ledgers])

        if wait:
            await show()
        else:
            self._scheduler.start(f"worker {rank}'s evaluation {number}", show())

    async def look_alone(
        self, rank: int, session: Session[Any], server: ServerPort | None, look: Look
    ) -> None:
        """Show `look` the server's model now, at this worker alone."""
        port = self._port(session, self._new_queue(), server)
        with shown(await session.conductor.publish(port, alone=True), session):
            look([ledger.totals() for ledger in self._ledgers])

    def _new_queue(self) -> CollectiveQueue:
        """Make the exchanges of one evaluation: a worker may come to the next before others to this one."""
        world = len(self._uncounted)
        queue = CollectiveQueue(Lane.FRONT, self._scheduler, self._uncounted, world, cohorts=self._cohorts)
        for rank in self._left:
            queue.remove_worker(rank)
        return queue

    def _trained_with(self, rank: int) -> Sequence[int]:
        """Return the ranks that the session of this one trains: its own, or those of its cohort."""
        return next((ranks for ranks in self._cohorts or () if rank in ranks), [rank])

    def _port(self, session: Session[Any], queue: CollectiveQueue, server: ServerPort | None) -> VirtualPort:
        """Return a port to this evaluation, of the kind that the session trains with."""
        rank, kind = session.port.rank, type(session.port)
        assert issubclass(kind, VirtualPort)
        port = kind(rank, dict.fromkeys(Lane, queue), self._uncounted[rank])
        if server is not None:
            port.connect(server)
        return port


class _Evaluation(NamedTuple):
    """An evaluation that not all workers have come to."""

    queue: CollectiveQueue
    totals: dict[int, WorkerTotals]  # by rank, of those who have come


@contextmanager
def shown(model: PublishedModel, session: Session[Any]) -> Iterator[None]:
    if session.replica.weights[0].is_cuda:
        torch.cuda.synchronize()  # gradients in progress, on streams of their own, read these weights
    restore = model.show(session.replica)
    try:
        yield
    finally:
        restore()
