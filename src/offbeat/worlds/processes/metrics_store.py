"""Metrics store: every rank posts its totals from time to time, and rank 0 reads them without waiting."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from torch.distributed import Store

from offbeat.core.ledger import WorkerTotals
from offbeat.errors import RankLost
from offbeat.worlds.processes.store import TIMEOUT_S, DeadlineStore

EVERY_S = 0.5


class MetricsStore:
    """One rank's view of the totals that all ranks have posted to the rendezvous store."""

    def __init__(self, store: Store | DeadlineStore, rank: int, world: int) -> None:
        timeout_s = store.timeout_s if isinstance(store, DeadlineStore) else TIMEOUT_S
        self._store = DeadlineStore.of(store, timeout_s).prefixed("metrics")
        self.rank = rank
        self.world = world
        self._posted_at = 0.0
        self._posting: Future[None] | None = None  # the latest post, which may be on its way
        self._naming: Future[None] | None = None  # the same of this rank's host
        self._gathers = 0

    def post(self, totals: WorkerTotals, at_once: bool = False) -> bool:
        """Post at most once per `EVERY_S`, or at once; return whether it did.

        A post in the middle of training is not waited for: on a busy link it takes longer than a step. While
        one is on its way, no other is sent.
        """
        now = time.monotonic()
        if not at_once and now - self._posted_at < EVERY_S:
            return False
        wait = at_once or self._failed(now)
        if not wait and self._posting is not None and not self._posting.done():
            return False
        if self._naming is None or (self._naming.done() and self._naming.exception()):
            self._naming = self._store.set_later(f"host/{self.rank}", socket.gethostname())
        text = json.dumps(asdict(totals))
        if wait:
            self._store.set(f"{self.rank}", text)  # reconnects, and raises an error at the deadline
            self._posting = None
        else:
            self._posting = self._store.set_later(f"{self.rank}", text)
        self._posted_at = now
        return True

    def _failed(self, now: float) -> bool:
        """Return whether the latest post failed, or has no answer at its deadline."""
        if self._posting is None:
            return False
        if self._posting.done():
            return self._posting.exception() is not None
        return now - self._posted_at > self._store.timeout_s

    def latest(self) -> list[WorkerTotals]:
        """Return the last post of every rank, without ranks that have not posted yet."""
        posted = [str(r) for r in range(self.world) if self._store.check([str(r)])]
        return [WorkerTotals(**json.loads(self._store.get(key))) for key in posted]

    def hosts(self) -> dict[int, str]:
        """Return the host name of every rank that has posted."""
        posted = [r for r in range(self.world) if self._store.check([f"host/{r}"])]
        return {rank: self._store.get(f"host/{rank}").decode() for rank in posted}

    def set_json(self, key: str, value: Any) -> None:
        """Keep a value for workers that join later."""
        self._store.set(key, json.dumps(value))

    def get_json(self, key: str) -> Any:
        """Return a value that was kept; None if there is none."""
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def gather_json(self, value: Any, timeout_s: float) -> list[Any]:
        """Return every rank's value at rank 0, an empty list elsewhere; all ranks must call it."""
        self._gathers += 1
        keys = [f"{self._gathers}/{rank}" for rank in range(self.world)]
        self._store.set(keys[self.rank], json.dumps(value))
        if self.rank:
            return []
        if not self._store.wait(keys, timeout_s):
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            named = ", ".join(map(str, missing))
            raise RankLost(f"rank {named} has not reported its results within {timeout_s:.0f} s")
        return [json.loads(self._store.get(key)) for key in keys]
