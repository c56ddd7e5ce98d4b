"""Snapshots: a shard's state on disk, from which it starts after a crash.

A snapshot stops the shard for no longer than it takes to copy its weights, into memory that is allocated
once. A thread writes the copy to a new file, which then replaces the last snapshot: whenever the machine
stops, there is a complete one.
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

    def start(self, take: Callable[[Tensors], dict[int, int]]) -> None:
        """Write a snapshot now, and one every `every_s` seconds.

        `take` copies the weights, and returns the clocks of the pushes that they contain.
        """
        self.write(take)

        def repeat() -> None:
            while not self._stop.wait(self.every_s):
                self.write(take)

        Thread(target=repeat, name="snapshots", daemon=True).start()

    def write(self, take: Callable[[Tensors], dict[int, int]]) -> None:
        """Write a snapshot now."""
        with self._writing:
            if self._stop.is_set():  # the shard ended while this one was to begin
                return
            at = time.time()  # all pushes acknowledged before are in it
            applied = take(self._copy)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self.path.with_suffix(".new")
            with unfinished.open("wb") as file:
                torch.save({"weights": self._copy, "applied": applied, "at": at}, file)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(self.path)

    def read(self) -> ShardState | None:
        """Read the last snapshot; None: there is none."""
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
        """Write no more snapshots; delete the last one, unless it is to be kept."""
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
