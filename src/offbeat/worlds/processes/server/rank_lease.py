"""Leases of ranks, for workers that were started individually: each part of the data has a worker.

A rank is held by a lease in the server's store: its holder counts a number up. A new worker takes the rank
that it had under the same name (OFFBEAT_WORKER), else one that nobody holds, else one whose holder does not
count any more. So a worker that replaces a dead one trains the dead one's part of the data.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from threading import Event, Thread

from offbeat.errors import RankLost
from offbeat.worlds.processes.store import DeadlineStore

WORKER = "OFFBEAT_WORKER"  # the environment variable: a name that a worker keeps when it is started again
BEAT_S = 1.0  # between the counts of a holder
LEASE_S = 5.0  # without a count, after which a rank is free
RELEASE_S = 2.0  # for the store to take a rank back; if it is gone, nobody needs the rank
FREE = "free"


class RankLease:
    """One worker's lease on a rank."""

    def __init__(self, store: DeadlineStore, worker: int, workers: int) -> None:
        self._store = store.prefixed("ranks")
        self._holder = f"{os.environ.get(WORKER, '')}/{worker}"
        self._ended = Event()
        self.rank = self._acquire(worker, workers)
        self._beat()
        Thread(target=self._keep, name="rank lease", daemon=True).start()

    def release(self) -> None:
        """Give the rank back, for the next worker."""
        if not self._ended.is_set():
            self._ended.set()
            with suppress(RankLost):
                store = self._store.within(RELEASE_S)
                store.compare_set(f"holder/{self.rank}", self._holder, FREE)

    def _acquire(self, worker: int, workers: int) -> int:
        if own := os.environ.get(WORKER):
            for rank in range(workers):
                holder = self._holder_of(rank)
                if holder.rpartition("/")[0] == own and self._replace(rank, holder, self._holder):
                    return rank
        for rank in range(workers):
            if any(self._replace(rank, unused, self._holder) for unused in ("", FREE)):
                return rank
        before = {rank: (self._holder_of(rank), self._count_of(rank)) for rank in range(workers)}
        deadline = time.monotonic() + LEASE_S
        while time.monotonic() < deadline:
            time.sleep(min(BEAT_S / 2, LEASE_S))
            before = {rank: seen for rank, seen in before.items() if self._count_of(rank) == seen[1]}
            if not before:
                break
        for rank, (holder, _) in before.items():
            if self._replace(rank, holder, self._holder):
                return rank
        return worker % workers  # more workers than parts of the data

    def _keep(self) -> None:
        while not self._ended.wait(BEAT_S):
            with suppress(RankLost):  # the store may come back; if not, the worker's own calls say so
                self._beat()

    def _beat(self) -> None:
        self._store.within(LEASE_S).add(f"count/{self.rank}", 1)

    def _holder_of(self, rank: int) -> str:
        key = f"holder/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _count_of(self, rank: int) -> int:
        return self._store.add(f"count/{rank}", 0)

    def _replace(self, rank: int, expected: str, holder: str) -> bool:
        """Replace the holder of a rank; return whether it was the expected one."""
        return self._store.compare_set(f"holder/{rank}", expected, holder).decode() == holder
