"""Supervisor: starts a shard's process, and starts it again when it dies.

A dedicated server whose shards keep copies has a spare of each: a process that has imported all that a
shard imports, and waits to become one. All workers wait for a shard that was started again, and most of that
time it would import torch.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from threading import Event, Thread

from offbeat.errors import RankLost
from offbeat.worlds.processes.server.auth import TOKEN
from offbeat.worlds.processes.server.config import ShardConfig
from offbeat.worlds.processes.server.snapshots import Snapshots

EXIT_UNRECOVERABLE = 3  # exit code of a shard that would fail again
PATIENCE_S = 0.5  # between attempts to kill the process
QUICKLY_S = 2.0  # a shard that dies sooner than this would die again
SPARE = "spare"  # instead of a shard's config
log = logging.getLogger("offbeat.server")


class Supervisor:
    """Supervisor of one shard's process, from a thread of its own."""

    def __init__(
        self, config: ShardConfig, token: bytes, on_failure: Callable[[str], None] = lambda reason: None
    ) -> None:
        self._config = replace(config, parent=os.getpid())
        self._token = token
        self._on_failure = on_failure
        self.failed = False  # whether the shard died and would die again
        self._stopping = Event()
        # Instead of joining the thread: an interrupted join() believes that it has ended.
        self._ended = Event()
        self._spare: subprocess.Popen[bytes] | None = None
        self._process = self._start()
        Thread(target=self._watch, name=f"supervisor of shard {config.shard}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, patience_s: float | None = None) -> bool:
        """Wait until the shard has ended for good; return whether it has."""
        return self._ended.wait(patience_s)

    def stop(self, patience_s: float) -> None:
        """Wait until the shard ends by itself, kill it after `patience_s`, and do not start it again."""
        self._stopping.set()
        if not self.wait(patience_s):
            self._process.kill()
            while not self._ended.wait(PATIENCE_S):
                self._process.kill()  # the watching thread may just have started it again
            for config in self._config.of_process():
                Snapshots(Path(config.snapshot), config.snapshot_s).end(keep=config.dedicated)

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the shard, in the spare if there is one, and a new spare."""
        process = self._use_spare() or self._popen(command(self._config))
        if self._config.dedicated and self._config.second is not None:
            self._spare = self._popen(command(None), stdin=subprocess.PIPE)
        return process

    def _use_spare(self) -> subprocess.Popen[bytes] | None:
        """Tell the spare to become the shard; None if there is none, or it has died."""
        spare, self._spare = self._spare, None
        if spare is None or spare.poll() is not None:
            return None
        assert spare.stdin is not None
        try:
            spare.stdin.write(as_text(self._config).encode() + b"\n")
            spare.stdin.close()
        except OSError:  # it has just died
            spare.wait()
            return None
        return spare

    def _end_spare(self) -> None:
        if self._spare is not None:
            self._spare.kill()
            self._spare.communicate()

    def _popen(self, arguments: list[str], stdin: int | None = None) -> subprocess.Popen[bytes]:
        # A strategy from outside may lie beside the user's script.
        modules = os.pathsep.join(folder or str(Path.cwd()) for folder in sys.path)
        environment = {**os.environ, TOKEN: self._token.decode(), "PYTHONPATH": modules}
        return subprocess.Popen(arguments, env=environment, stdin=stdin)

    def _watch(self) -> None:
        while True:
            began = time.monotonic()
            code = self._process.wait()
            if code == 0 or self._stopping.is_set():
                break
            if code == EXIT_UNRECOVERABLE or time.monotonic() - began < QUICKLY_S:
                log.error("shard %d cannot continue (exit code %d)", self._config.shard, code)
                self.failed = True
                self._tell(f"its process failed with exit code {code}, and would fail again")
                break
            log.warning("shard %d died (exit code %d), restarting it", self._config.shard, code)
            self._process = self._start()
        self._end_spare()
        self._ended.set()

    def _tell(self, reason: str) -> None:
        """Let the workers know, which would wait for the shard until their timeout."""
        try:
            self._on_failure(reason)
        except RankLost as unreachable:  # then the workers' own calls fail, too
            log.info("nobody could be told that shard %d has failed: %s", self._config.shard, unreachable)


def command(config: ShardConfig | None) -> list[str]:
    """Return the command line that starts a shard; None: a spare, which reads its config later."""
    text = SPARE if config is None else as_text(config)
    return [sys.executable, "-m", "offbeat.worlds.processes.server", text]


def as_text(config: ShardConfig) -> str:
    return json.dumps(asdict(config))
