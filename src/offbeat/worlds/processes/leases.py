"""Leases on batches: who has claimed what, what is done, and what a dead worker has left undone.

    claim    n ← next(epoch)++;   held(worker) ← held(worker) ∪ {n}
    done     done(epoch, worker) ← done(epoch, worker) ∪ {n};   held(worker) ← held(worker) ∖ {n}
    alive    the worker's beat has changed within the last lease_s, by the clock of whoever looks
    orphan   n < next(epoch), not done, and held by a dead worker or, for lease_s, by none

All of it is in a store that the workers share, and no clock is compared with another host's. An orphan is
claimed by replacing its last claimant, so one worker gets it. A worker that is cut off for longer than its
lease and comes back may do a batch that another has done meanwhile: each batch is done at least once, and
exactly once while no living worker falls silent.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from threading import Event, Thread
from typing import NamedTuple

from offbeat.errors import RankLost
from offbeat.worlds.processes.store import DeadlineStore

BEATS = 4  # per lease


class Batch(NamedTuple):
    """A batch by its epoch, and its number in that epoch."""

    epoch: int
    number: int


class Look(NamedTuple):
    """The batches that were claimed and are not done, as one look at the store shows them."""

    orphans: list[Batch]
    held: dict[Batch, str]  # by which living worker; "": not known yet


class Leases:
    """One worker's leases. Calls from one thread at a time; the beat has a thread of its own."""

    def __init__(
        self,
        store: DeadlineStore,
        worker: str,
        per_epoch: int,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker = worker
        self._store = store
        self._per_epoch = per_epoch
        self._lease_s = lease_s
        self._clock = clock
        self._held: set[Batch] = set()
        self._beats: dict[str, tuple[int, float]] = {}  # of others: the latest, and when it was first seen
        self._unknown_since: dict[Batch, float] = {}  # batches that were claimed, and that nobody holds
        self._first_open = 0  # all batches of earlier epochs are done
        self._ended = Event()
        store.append("workers", f"{worker} ")
        self._beat()
        Thread(target=self._keep, name="offbeat-leases", daemon=True).start()

    def claim(self, epoch: int) -> int:
        """Claim the next batch of an epoch, and return its number; none is left from `per_epoch` on."""
        number = self._store.add(f"next/{epoch}", 1) - 1
        if number < self._per_epoch:
            self._hold(Batch(epoch, number))
        return number

    def done(self, batch: Batch) -> None:
        """Record that a batch has been trained."""
        self._store.append(f"done/{batch.epoch}/{self.worker}", f"{batch.number} ")
        self._held.discard(batch)
        self._write_held()

    def keep_only(self, batches: Collection[Batch]) -> None:
        """Leave all that this worker holds to others, except these batches."""
        if not self._held <= set(batches):
            self._held.intersection_update(batches)
            self._write_held()

    def close(self) -> None:
        """Leave all that this worker holds to others, and end the beat."""
        self._ended.set()
        self.keep_only(())

    def adopt(self, batch: Batch) -> bool:
        """Claim an orphan; return False if another worker was quicker."""
        key = f"adopted/{batch.epoch}/{batch.number}"
        before = self._store.get(key).decode() if self._store.check([key]) else ""
        if before and self._is_alive(before):
            return False
        if self._store.compare_set(key, before, self.worker).decode() != self.worker:
            return False
        self._hold(batch)
        return True

    def look(self, epochs: int) -> Look:
        """Look for batches of the first `epochs` epochs that were claimed and are not done."""
        workers = list(dict.fromkeys(self._read("workers").split()))
        holders: dict[Batch, str] = {}
        for worker in workers:
            alive = self._is_alive(worker)
            for batch in json.loads(self._read(f"held/{worker}") or "[]"):
                if alive or Batch(*batch) not in holders:  # what a dead one held, another may have adopted
                    holders[Batch(*batch)] = worker
        orphans, held = [], {}
        for batch in self._undone(epochs, workers):
            holder = holders.get(batch)
            if holder is None and not self._is_lost(batch):
                held[batch] = ""
            elif holder is None or not self._is_alive(holder):
                orphans.append(batch)
            else:
                held[batch] = holder
                self._unknown_since.pop(batch, None)
        return Look(orphans, held)

    def _undone(self, epochs: int, workers: list[str]) -> list[Batch]:
        undone = []
        for epoch in range(self._first_open, epochs):
            claimed = min(self._store.add(f"next/{epoch}", 0), self._per_epoch)
            done = {int(n) for worker in workers for n in self._read(f"done/{epoch}/{worker}").split()}
            left = [Batch(epoch, number) for number in range(claimed) if number not in done]
            if epoch == self._first_open and claimed == self._per_epoch and not left:
                self._first_open += 1
            undone += left
        return undone

    def _is_alive(self, worker: str) -> bool:
        if worker == self.worker:
            return True
        beat, now = self._store.add(f"beat/{worker}", 0), self._clock()
        before, since = self._beats.get(worker, (-1, now))
        if beat != before:
            since = now
        self._beats[worker] = (beat, since)
        return now - since < self._lease_s

    def _is_lost(self, batch: Batch) -> bool:
        """Return whether nobody has held a batch for a lease: its worker died, or its claim got lost."""
        now = self._clock()
        return now - self._unknown_since.setdefault(batch, now) >= self._lease_s

    def _hold(self, batch: Batch) -> None:
        self._held.add(batch)
        self._write_held()

    def _write_held(self) -> None:
        self._store.set(f"held/{self.worker}", json.dumps(sorted(self._held)))

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _keep(self) -> None:
        while not self._ended.wait(self._lease_s / BEATS):
            with suppress(RankLost):  # the store may come back; if not, the worker's own calls say so
                self._beat()

    def _beat(self) -> None:
        self._store.within(self._lease_s).add(f"beat/{self.worker}", 1)
