"""Board: where every rank posts its totals from time to time, and rank 0 reads them, without waiting."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store

from offbeat.core.ledger import WorkerTotals

EVERY_S = 0.5


class MetricsStore:
    def __init__(self, store: Store, rank: int, world: int) -> None:
        self._store = PrefixStore("board", store)
        self.rank = rank
        self.world = world
        self._posted_at = 0.0
        self._editions = 0

    def post(self, entry: WorkerTotals) -> bool:
        """Post at most every `EVERY_S`; whether it was time."""
        now = time.monotonic()
        if now - self._posted_at < EVERY_S:
            return False
        if not self._posted_at:
            self._store.set(f"host/{self.rank}", socket.gethostname())
        self._posted_at = now
        self._store.set(f"{self.rank}", json.dumps(asdict(entry)))
        return True

    def latest(self) -> list[WorkerTotals]:
        """What every rank posted last; a rank that has not posted yet is left out."""
        posted = [str(r) for r in range(self.world) if self._store.check([str(r)])]
        return [WorkerTotals(**json.loads(self._store.get(key))) for key in posted]

    def hosts(self) -> dict[int, str]:
        """On which machine each rank is, of those that have posted."""
        posted = [r for r in range(self.world) if self._store.check([f"host/{r}"])]
        return {rank: self._store.get(f"host/{rank}").decode() for rank in posted}

    def collect(self, mine: Any, timeout_s: float) -> list[Any]:
        """What every rank brings, as JSON, at rank 0 (elsewhere nothing); all call it at the same point."""
        self._editions += 1
        keys = [f"{self._editions}/{rank}" for rank in range(self.world)]
        self._store.set(keys[self.rank], json.dumps(mine))
        if self.rank:
            return []
        self._store.wait(keys, timedelta(seconds=timeout_s))
        return [json.loads(self._store.get(key)) for key in keys]
