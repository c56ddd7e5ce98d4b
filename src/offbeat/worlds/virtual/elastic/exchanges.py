"""Collective operations among a roster, which end only while all of its workers live and reach each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

from offbeat.core.ledger import Ledger
from offbeat.core.port import Lane, Signature
from offbeat.worlds.virtual.collectives import Collective, CollectiveQueue
from offbeat.worlds.virtual.elastic.life import Life, Lives
from offbeat.worlds.virtual.flow import Transfer
from offbeat.worlds.virtual.scheduler import Event, Scheduler

T = TypeVar("T")


class RosterQueue(CollectiveQueue):
    """The operations of one lane in one epoch.

    While a worker hangs or is cut off, no operation of it ends. Once a worker is dead, none ever does.
    """

    def __init__(
        self, lane: Lane, scheduler: Scheduler, ledgers: Sequence[Ledger], lives: Sequence[Life]
    ) -> None:
        ranks = [life.rank for life in lives]
        super().__init__(lane, scheduler, [ledgers[rank] for rank in ranks], len(ranks), ranks)
        self.lives = lives
        self._in_transfer: Transfer | None = None
        self._abandoned = False

    def join(self, rank: int, signature: Signature, tensors: list[Tensor], value: T) -> Event[T]:
        if self._abandoned:
            return Event(self.scheduler, self.ledgers[rank], lambda: "an epoch that was closed")
        return super().join(rank, signature, tensors, value)

    def _transfer(self, transfer: Transfer, operation: Collective) -> None:
        self._in_transfer = transfer
        super()._transfer(transfer, operation)

    def _finish(self, operation: Collective) -> None:
        if self._abandoned:
            return
        self._in_transfer = None
        until_s = max(life.blocked_until for life in self.lives)
        if self.scheduler.now < until_s:
            if until_s < math.inf:
                self.scheduler.at(until_s, lambda: self._finish(operation))
            return
        super()._finish(operation)
        for life in self.lives:
            life.alarm.ring()

    def stop_transfer(self) -> None:
        """Take what is in transfer off the network: one of its ends is dead or closed."""
        if self._in_transfer is not None:
            self.scheduler.cancel(self._in_transfer)
            self._in_transfer = None

    def abandon(self) -> None:
        """End all operations, without a result."""
        if self._abandoned:
            return
        self._abandoned = True
        self.stop_transfer()
        for operation in (*self._open.values(), *self._queue):
            for rank in operation.participants:
                if not operation.free:
                    self.ledgers[rank].operation_ended()


class Exchanges:
    """The queues of all epochs, each made by the worker that comes first."""

    def __init__(self, scheduler: Scheduler, ledgers: Sequence[Ledger], lives: Lives) -> None:
        self._scheduler = scheduler
        self._ledgers = ledgers
        self._lives = lives
        self._queues: dict[str, RosterQueue] = {}

    def queue(self, key: str, lane: Lane, names: Sequence[str]) -> RosterQueue:
        """Return the queue of these workers under this key."""
        key = f"{key}/{lane.value}"
        if key not in self._queues:
            lives = [self._lives.by_name[name] for name in names]
            self._queues[key] = RosterQueue(lane, self._scheduler, self._ledgers, lives)
        return self._queues[key]

    def on_death(self, life: Life) -> None:
        """Stop all transfers of a worker that has died."""
        for queue in self._queues.values():
            if life in queue.lives:
                queue.stop_transfer()
