"""Keeper: starts a shard's process, and starts it again when it dies."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

from offbeat.worlds.processes.server.__main__ import EXIT_UNRECOVERABLE, command
from offbeat.worlds.processes.server.config import ShardConfig
from offbeat.worlds.processes.server.snapshots import Snapshots
from offbeat.worlds.processes.server.wire import TOKEN

PATIENCE_S = 0.5
QUICKLY_S = 2.0  # a shard that lived no longer than this died of something that will kill it again
log = logging.getLogger("offbeat.server")


class Supervisor:
    """One shard's. It watches from a thread of its own."""

    def __init__(self, post: ShardConfig, token: bytes) -> None:
        self._post = replace(post, parent=os.getpid())
        self._token = token
        self.failed = False  # it died, and starting it again would not help
        self._released = Event()
        self._ended = Event()  # not the thread's end: a join() that Ctrl-C interrupts forgets that it runs
        self._process = self._start()
        Thread(target=self._keep, name=f"keeper of shard {post.shard}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command(self._post), env={**os.environ, TOKEN: self._token.decode()})

    def _keep(self) -> None:
        while True:
            began = time.monotonic()
            code = self._process.wait()
            if code == 0 or self._released.is_set():
                break
            if code == EXIT_UNRECOVERABLE or time.monotonic() - began < QUICKLY_S:
                log.error("shard %d cannot go on (exit code %d)", self._post.shard, code)
                self.failed = True
                break
            log.warning("shard %d died (exit code %d): starting it again", self._post.shard, code)
            self._process = self._start()
        self._ended.set()

    def wait(self, patience_s: float | None = None) -> bool:
        """Until the shard has ended for good; whether it has."""
        return self._ended.wait(patience_s)

    def release(self, patience_s: float) -> None:
        """See the shard end, by itself or, when patience ends, by force. It is not started again."""
        self._released.set()
        if not self.wait(patience_s):
            self._process.kill()
            while not self._ended.wait(PATIENCE_S):
                self._process.kill()  # it was being started again just then
            Snapshots(Path(self._post.snapshot), self._post.snapshot_s).end(keep=self._post.dedicated)
