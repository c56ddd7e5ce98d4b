"""Attendance: who has joined a shard, who went away without a word, and who may still return."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from offbeat.worlds.processes.server.config import ShardConfig

RETURN_S = 5.0  # for a worker whose connection broke to return, before the shard may end without it


class Attendance:
    """The workers that a shard has seen; guarded by the shard's lock."""

    def __init__(self, config: ShardConfig, known: Iterable[int]) -> None:
        self.started_s = time.monotonic()
        self._config = config
        self._seen = set(known)  # all workers that have ever joined
        self._was_opened = False  # whether all had joined before a crash, some after the last snapshot
        # When each worker left without LEAVE, or this shard crashed; -inf: the worker was silent.
        self._left_s = dict.fromkeys(self._seen, self.started_s)

    @property
    def joined(self) -> int:
        return len(self._seen)

    @property
    def complete(self) -> bool:
        """True if all workers have joined, even if some have left again."""
        return self._was_opened or self.joined >= self._config.workers

    def note(self, worker: int, pushes: int) -> None:
        """Note that a worker is or was here, and how many of its pushes were acknowledged.

        None is before all workers have joined. After a crash the last snapshot may know fewer of them, and
        who has left since does not join again.
        """
        self._seen.add(worker)
        self._was_opened = self._was_opened or pushes > 0
        self._left_s.pop(worker, None)

    def lose(self, worker: int, silent: bool) -> None:
        """Note that a worker has left without LEAVE, or was removed because it was silent."""
        self._left_s[worker] = -math.inf if silent else time.monotonic()

    def has_forgotten(self, worker: int) -> bool:
        """Return whether a worker without a connection was away for so long that others have trained on."""
        return time.monotonic() - self._left_s.get(worker, self.started_s) > self._config.silence_s

    def may_return(self) -> bool:
        """Return whether a worker that did not leave by itself was here a moment ago."""
        left_s = list(self._left_s.values())
        if self.joined < self._config.workers:  # the others were here before the crash
            left_s.append(self.started_s)
        return any(time.monotonic() - each < RETURN_S for each in left_s)
