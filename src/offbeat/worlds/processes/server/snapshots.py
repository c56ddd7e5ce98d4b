"""Snapshots: a shard's state on disk, from which it starts after a crash.

A snapshot stops the shard for no longer than it takes to copy its state, into memory that is allocated once.
A thread writes the copy to a new file, which then replaces the last snapshot. The one before is kept too: a
shard whose last snapshot is damaged starts from the previous one. A disk that is full or fails never ends the
shard: it says so, and tries again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock, Thread

from offbeat.errors import OffbeatError
from offbeat.server.sharding import ShardState
from offbeat.worlds.processes.server.snapshot_file import read_snapshot, sync_folder, write_snapshot

RETRY_S = 2.0  # between attempts to write, while the disk refuses
CopyState = Callable[[ShardState], None]  # copies the shard's state, into memory that is allocated once
log = logging.getLogger("offbeat.server")


class Snapshots:
    """Snapshots of one shard."""

    def __init__(self, path: Path, every_s: float) -> None:
        self.path = path
        self.every_s = every_s
        self._copy = ShardState([])
        self._failing = False
        self._damaged = False  # whether the last snapshot is not worth keeping
        self._stop = Event()
        self._writing = Lock()

    @property
    def previous(self) -> Path:
        """The snapshot before the last one."""
        return self.path.with_suffix(".previous")

    @property
    def unfinished(self) -> Path:
        """The snapshot that is being written."""
        return self.path.with_suffix(".new")

    def start(self, copy_state: CopyState) -> None:
        """Write a snapshot now, and one every `every_s` seconds; if that fails, try again sooner."""
        written = self.write(copy_state)

        def repeat(written: bool) -> None:
            while not self._stop.wait(self.every_s if written else min(self.every_s, RETRY_S)):
                written = self.write(copy_state)

        Thread(target=repeat, args=(written,), name="snapshots", daemon=True).start()

    def write(self, copy_state: CopyState) -> bool:
        """Write a snapshot now; return whether it is on disk. A failure is logged once, and so is its end."""
        with self._writing:
            if self._stop.is_set():  # the shard has ended meanwhile
                return False
            copy_state(self._copy)
            try:
                self._put_in_place()
            except OSError as failed:
                self._note_failure(failed)
                return False
            if self._failing:
                log.warning("snapshots are written again: %s", self.path)
            self._failing = False
            return True

    def write_anew(self, copy_state: CopyState) -> None:
        """Write a snapshot that shares no clocks with earlier ones, and delete those.

        A shard that started from an earlier one would take new pushes for old ones. Without any snapshot it
        says that its weights are lost.
        """
        if not self.write(copy_state):
            self.path.unlink(missing_ok=True)
        self.previous.unlink(missing_ok=True)

    def write_last(self, copy_state: CopyState, patience_s: float) -> bool:
        """Write the final snapshot, and try again for `patience_s`; return whether it is on disk."""
        deadline = time.monotonic() + patience_s
        while not self.write(copy_state):
            if time.monotonic() > deadline:
                return False
            time.sleep(min(RETRY_S, patience_s))
        return True

    def read(self) -> ShardState | None:
        """Read the last snapshot, or the one before if it is damaged; return None if there is none."""
        problems: list[str] = []
        for path in (self.path, self.previous):
            if path.exists():
                try:
                    state = read_snapshot(path)
                except OffbeatError as damaged:
                    problems.append(f"the snapshot {path} cannot be read ({damaged})")
                    self._damaged = self._damaged or path == self.path
                    continue
                if problems:
                    log.error("%s: starting from the previous one, which is older", problems[0])
                return state
        if problems:
            raise OffbeatError(f"{'; '.join(problems)}: move it away to start anew")
        return None

    def end(self, keep: bool) -> None:
        """Stop writing snapshots, and delete them, unless `keep` is set."""
        self._stop.set()
        with self._writing:
            if not keep:
                for path in (self.path, self.previous, self.unfinished):
                    path.unlink(missing_ok=True)
                with suppress(OSError):  # other shards' snapshots may be there
                    self.path.parent.rmdir()

    def _put_in_place(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_snapshot(self.unfinished, self._copy)
        if self.path.exists() and not self._damaged:
            self.path.replace(self.previous)
        self._damaged = False
        self.unfinished.replace(self.path)
        sync_folder(self.path.parent)

    def _note_failure(self, failed: OSError) -> None:
        with suppress(OSError):
            self.unfinished.unlink(missing_ok=True)  # a part of it would fill the disk for others
        if not self._failing:
            log.error(
                "a snapshot cannot be written (%s): training continues, but a crash would now lose more. "
                "Trying again every %.0f s",
                failed,
                min(self.every_s, RETRY_S),
            )
        self._failing = True
