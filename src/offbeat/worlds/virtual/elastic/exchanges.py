"""Collective operations among a roster, which end only while all of its workers live and reach each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

from offbeat.core.ledger import Ledger
from offbeat.core.port import Lane, Op, Signature
from offbeat.worlds.virtual.collectives import Collective, CollectiveQueue
from offbeat.worlds.virtual.elastic.life import Life, Lives
from offbeat.worlds.virtual.flow import Transfer
from offbeat.worlds.virtual.reductions import reduced
from offbeat.worlds.virtual.scheduler import Event, Scheduler

T = TypeVar("T")


class RosterQueue(CollectiveQueue):
    """The operations of one lane in one epoch.

    While a worker hangs or is cut off, no operation of it ends on all workers. Once a worker is dead, none
    ever does. But it ends on some of them, as over real connections: these have the result, and the others do
    not, so it is the votes that must decide.

    The results of an all-reduce and of a broadcast replace the tensors in the lists that workers joined with:
    one tensor for all of them, which nobody changes. What they sent stays as it is, and can be sent again.
    """

    def __init__(
        self, lane: Lane, scheduler: Scheduler, ledgers: Sequence[Ledger], lives: Sequence[Life]
    ) -> None:
        ranks = [life.rank for life in lives]
        super().__init__(lane, scheduler, [ledgers[rank] for rank in ranks], len(ranks), nodes=ranks)
        self.lives = lives
        self._in_transfer: Transfer | None = None
        self.abandoned = False
        self._computed = 0  # the last operation whose result was

    def join(
        self, rank: int, signature: Signature, tensors: Sequence[Tensor], value: T, delay_s: float = 0.0
    ) -> Event[T]:
        if self.abandoned:
            return Event(self.scheduler, self.ledgers[rank], lambda: "an epoch that was closed")
        return super().join(rank, signature, tensors, value, delay_s)

    def _count_sent(self, rank: int, nbytes: int) -> None:
        if not self.lives[rank].dead:
            self.ledgers[rank].sent_even_paused(nbytes)  # it may look at the model, but this is of training

    def _transfer(self, transfer: Transfer, operation: Collective) -> None:
        self._in_transfer = transfer
        super()._transfer(transfer, operation)

    def _finish(self, operation: Collective) -> None:
        if self.abandoned:
            return
        self._in_transfer = None
        until_s = max(life.blocked_until for life in self.lives)
        if self.scheduler.now < until_s:
            self._end_on_some(operation)
            if until_s < math.inf:
                self.scheduler.at(until_s, lambda: self._finish(operation))
            return
        super()._finish(operation)

    def _compute(self, operation: Collective) -> None:
        if operation.number <= self._computed:
            return
        self._computed = operation.number
        name, variant, _ = operation.signature
        if name == "all_gather":
            super()._compute(operation)
            return
        lists = [participant.tensors for _, participant in sorted(operation.participants.items())]
        sent = [tensor for (tensor,) in lists]
        result = reduced(sent, Op(variant)) if name == "all_reduce" else sent[int(variant)].clone()
        for tensors in lists:
            assert isinstance(tensors, list)  # as the port of a roster has them
            tensors[0] = result

    def _end_part(self, operation: Collective, rank: int) -> None:
        if not operation.participants[rank].result.done():
            super()._end_part(operation, rank)
            self.lives[rank].alarm.ring()

    def _end_on_some(self, operation: Collective) -> None:
        """End an operation on every other worker, of which those that are dead do not see it."""
        self._compute(operation)
        for rank in operation.participants:
            if (rank + operation.number) % 2 == 0 and not self.lives[rank].dead:
                self._end_part(operation, rank)

    def on_death(self) -> None:
        """Break off the operation in transfer, for one of its workers has died."""
        self._stop_transfer()
        if self._queue and not self.abandoned:
            self._end_on_some(self._queue[0])

    def _stop_transfer(self) -> None:
        if self._in_transfer is not None:
            self.scheduler.cancel(self._in_transfer)
            self._in_transfer = None

    def abandon(self) -> None:
        """End all operations, without a result."""
        if self.abandoned:
            return
        self.abandoned = True
        self._stop_transfer()
        for operation in (*self._open.values(), *self._queue):
            for rank, participant in operation.participants.items():
                if not operation.free and not participant.result.done():
                    self.ledgers[rank].operation_ended()


class Exchanges:
    """The queues of all epochs, each made by the worker that comes first."""

    def __init__(self, scheduler: Scheduler, ledgers: Sequence[Ledger], lives: Lives) -> None:
        self._scheduler = scheduler
        self._ledgers = ledgers
        self._lives = lives
        self._queues: dict[str, RosterQueue] = {}
        self._open: list[RosterQueue] = []  # those that were not abandoned at the last death, in order

    def queue(self, key: str, lane: Lane, names: Sequence[str]) -> RosterQueue:
        """Return the queue of these workers under this key."""
        key = f"{key}/{lane.value}"
        if key not in self._queues:
            lives = [self._lives.by_name[name] for name in names]
            self._queues[key] = RosterQueue(lane, self._scheduler, self._ledgers, lives)
            self._open.append(self._queues[key])
        return self._queues[key]

    def on_death(self, life: Life) -> None:
        """Stop all transfers of a worker that has died."""
        self._open = [queue for queue in self._open if not queue.abandoned]
        for queue in self._open:
            if life in queue.lives:
                queue.on_death()
