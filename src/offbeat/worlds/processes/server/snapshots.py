"""Snapshots: what a shard of the server writes to disk every so often, and starts from after a crash.

Taking one stops the shard for no more than a copy of its weights, into memory that is there already. Writing
is done beside it, into a file of another name that then takes the place of the last one: whenever the machine
stops, there is a whole snapshot.
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
from offbeat.server.server import ShardState


class Snapshots:
    """One shard's."""

    def __init__(self, path: Path, every_s: float) -> None:
        self.path = path
        self.every_s = every_s
        self._copy: Tensors = []
        self._stop = Event()
        self._writing = Lock()

    def start(self, take: Callable[[Tensors], dict[int, int]]) -> None:
        """Write one now and then every so often. `take` copies the weights and says what is in them."""
        self.write(take)

        def go_on() -> None:
            while not self._stop.wait(self.every_s):
                self.write(take)

        Thread(target=go_on, name="snapshots", daemon=True).start()

    def write(self, take: Callable[[Tensors], dict[int, int]]) -> None:
        with self._writing:
            if self._stop.is_set():  # it ended while this one was to begin
                return
            at = time.time()  # whatever was acknowledged before is in it
            applied = take(self._copy)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self.path.with_suffix(".new")
            with unfinished.open("wb") as file:
                torch.save({"weights": self._copy, "applied": applied, "at": at}, file)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(self.path)

    def read(self) -> ShardState | None:
        """The last one; None: there is none."""
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
        """Write no more; unless it is to be kept, leave nothing behind."""
        self._stop.set()
        with self._writing:
            if not keep:
                for path in (self.path, self.path.with_suffix(".new")):
                    path.unlink(missing_ok=True)
                with suppress(OSError):  # other shards' may be there, or it was not ours to make
                    self.path.parent.rmdir()


def copy_into(copy: Tensors, weights: Tensors) -> None:
    """Copy, into memory that is taken at the first time only."""
    if not copy:
        copy.extend(torch.empty_like(weight) for weight in weights)
    torch._foreach_copy_(copy, weights)
