"""A worker's request to a parameter server in virtual time, and the times that a timeline shows of it."""

from __future__ import annotations

from typing import Any, TypeVar

from offbeat.core.ledger import AT_SERVER, Ledger
from offbeat.core.port import PullResult
from offbeat.server.client import Operation
from offbeat.worlds.virtual.scheduler import Event, Scheduler

T = TypeVar("T")


class VirtualRequest(Event[T]):
    """An operation of one worker, to all shards and back."""

    __slots__ = ("_answered_s", "_arrived_s", "_began_s", "_nbytes", "_operation", "rank")

    def __init__(
        self, scheduler: Scheduler, ledger: Ledger, operation: Operation, nbytes: int, reason: str
    ) -> None:
        super().__init__(scheduler, ledger, lambda: reason)
        self.rank = ledger.rank
        self._operation = operation
        self._nbytes = nbytes
        self._began_s: float | None = None
        self._arrived_s: float | None = None  # at the first shard that it reaches
        self._answered_s = 0.0  # by the last shard
        if not ledger.is_paused:
            ledger.operation_started()

    def begin(self) -> None:
        """Record the time at which the first message leaves; earlier messages may have delayed it."""
        if self._began_s is None:
            self._began_s = self._scheduler.now

    def arrive(self) -> None:
        """Record the time at which the request reaches the first shard."""
        if self._arrived_s is None:
            self._arrived_s = self._scheduler.now

    def answer(self) -> None:
        """Record the time at which a shard sends its answer, which it may have held back until then."""
        self._answered_s = self._scheduler.now

    def complete(self, value: T) -> None:
        """Count the operation, and fire with its value."""
        if not self._ledger.is_paused:
            assert self._began_s is not None and self._arrived_s is not None
            self._ledger.operation_ended()
            kind, number = self._operation
            staleness = value.staleness if isinstance(value, PullResult) else None
            about: Any = {"nbytes": self._nbytes, "staleness": staleness}
            self._ledger.record_span(
                AT_SERVER, number, self._arrived_s, self._answered_s, operation=kind, **about
            )
            self._ledger.record_span(kind, number, self._began_s, **about)
        self.succeed(value)
