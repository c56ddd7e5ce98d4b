"""Standby: a worker that takes a shard's supervision over when the worker that supervised it has died.

The supervisor of a shard is the first rank of its host. The other ranks of that host watch it. When it has
died, one of them adopts the shard: if the shard dies too, it starts the shard again, from the snapshot on
this host. Process ids are signed, so that nobody without the token has a shard started beside a living one.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock, Thread

from offbeat.errors import OffbeatError, RankLost
from offbeat.worlds.processes.server.config import ShardConfig
from offbeat.worlds.processes.server.signed_store import SignedStore
from offbeat.worlds.processes.server.supervisor import Supervisor
from offbeat.worlds.processes.store import DeadlineStore

CHECK_S = 1.0
log = logging.getLogger("offbeat.server")


def publish_supervisor(store: DeadlineStore, token: bytes, shard: int) -> None:
    """Publish that this process supervises a shard."""
    SignedStore(store, token).set(f"supervisor/{shard}", str(os.getpid()))


def publish_process(store: DeadlineStore, token: bytes, shard: int) -> None:
    """Publish that this process is the shard."""
    SignedStore(store, token).set(f"process/{shard}", str(os.getpid()))


class Standby:
    """One rank's watch over the supervisor of its host's shard."""

    def __init__(self, store: DeadlineStore, config: ShardConfig, token: bytes) -> None:
        self._store = SignedStore(store, token)
        self._config = config
        self._token = token
        self._ended = Event()
        self._lock = Lock()
        self.supervisor: Supervisor | None = None  # of a shard that this rank has started again
        Thread(target=self._watch, name=f"standby of shard {config.shard}", daemon=True).start()

    def end(self) -> None:
        """Watch no longer."""
        self._ended.set()

    def stop(self, patience_s: float) -> None:
        """Watch no longer; wait until a shard that this rank has started again has ended."""
        self.end()
        with self._lock:
            if self.supervisor is not None:
                self.supervisor.stop(patience_s)

    def _watch(self) -> None:
        try:
            self._watch_supervisor()
        except RankLost as unreachable:  # the worker's own calls raise the same, where it matters
            log.info("shard %d: its supervisor is no longer watched: %s", self._config.shard, unreachable)
        except OffbeatError as forged:
            log.error(
                "shard %d: this worker no longer watches its supervisor: %s", self._config.shard, forged
            )

    def _watch_supervisor(self) -> None:
        shard = self._config.shard
        key, mine = f"supervisor/{shard}", str(os.getpid())
        supervisor = self._store.get(key)
        while not self._ended.wait(CHECK_S):
            if supervisor == mine:
                self._adopt()
            elif not is_running(int(supervisor)):
                before, supervisor = supervisor, self._store.replace(key, supervisor, mine)
                if supervisor == mine:
                    log.warning("shard %d: its supervisor %s has died, %s watches it", shard, before, mine)

    def _adopt(self) -> None:
        """Start the shard again if it has died."""
        process = int(self._store.get(f"process/{self._config.shard}"))
        with self._lock:
            if self.supervisor is None and not self._ended.is_set() and not is_running(process):
                log.warning("shard %d died, restarting it", self._config.shard)
                self.supervisor = Supervisor(self._config, self._token)


def is_running(pid: int) -> bool:
    """Return whether a process of this host exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        with suppress(OSError):  # a system without /proc
            os.kill(pid, 0)
            return not Path("/proc/self/stat").exists()
        return False
