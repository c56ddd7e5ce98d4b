"""Snapshots: a shard's state on disk, from which it starts after a crash.

A snapshot stops the shard for no longer than it takes to copy its weights, into memory that is allocated
once. A thread writes the copy to a new file, which then replaces the last snapshot: whenever the machine
stops, a complete snapshot is on disk.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock, Thread

import torch

from offbeat.errors import OffbeatError
from offbeat.server.messages import Tensors
from offbeat.server.sharding import ShardState


class Snapshots:
    """Snapshots of one shard."""

    def __init__(self, path: Path, every_s: float) -> None:
        self.path = path
        self.every_s = every_s
        self._copy: Tensors = []
        self._stop = Event()
        self._writing = Lock()

    def start(self, copy_state: Callable[[Tensors], dict[int, int]]) -> None:
        """Write a snapshot now, and one every `every_s` seconds.

        `copy_state` copies the weights, and returns the clocks of the pushes that they contain.
        """
        self.write(copy_state)

        def repeat() -> None:
            while not self._stop.wait(self.every_s):
                self.write(copy_state)

        Thread(target=repeat, name="snapshots", daemon=True).start()

    def write(self, copy_state: Callable[[Tensors], dict[int, int]]) -> None:
        """Write a snapshot now."""
        with self._writing:
            if self._stop.is_set():  # the shard has ended meanwhile
                return
            at = time.time()  # the snapshot contains all pushes acknowledged before
            applied = copy_state(self._copy)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self.path.with_suffix(".new")
            with unfinished.open("wb") as file:
                torch.save({"weights": self._copy, "applied": applied, "at": at}, file)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(self.path)

    def read(self) -> ShardState | None:
        """Read the last snapshot; return None if there is none."""
        if not self.path.exists():
            return None
        try:
            saved = torch.load(self.path, weights_only=True)
            return ShardState(weights=saved["weights"], applied=saved["applied"])
        except Exception as damaged:  # torch.load has no error of its own
            why = str(damaged).splitlines()[0] if str(damaged) else type(damaged).__name__
            raise OffbeatError(
                f"the snapshot {self.path} cannot be read ({why}): move it away to start anew"
            ) from damaged

    def end(self, keep: bool) -> None:
        """Stop writing snapshots, and delete the last one, unless `keep` is set."""
        self._stop.set()
        with self._writing:
            if not keep:
                for path in (self.path, self.path.with_suffix(".new")):
                    path.unlink(missing_ok=True)
                with suppress(OSError):  # other shards' snapshots may be there
                    self.path.parent.rmdir()


def copy_into(copy: Tensors, weights: Tensors) -> None:
    """Copy the weights, into memory that is allocated at the first call only."""
    if not copy:
        copy.extend(torch.empty_like(weight) for weight in weights)
    torch._foreach_copy_(copy, weights)
