"""The ledger of a real worker, whose operations end on other threads; virtual time has only one thread."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from offbeat.core.ledger import Ledger


class SharedLedger(Ledger):
    """A ledger whose operations may start and end on several threads."""

    def __init__(self, rank: int, clock: Callable[[], float]) -> None:
        super().__init__(rank, clock)
        self._lock = Lock()

    def _count_operations(self, change: int, nbytes: int = 0) -> None:
        with self._lock:
            super()._count_operations(change, nbytes)
