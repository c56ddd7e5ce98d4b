"""Launcher of elastic local workers: a worker that dies does not end the others, and is started again.

The launcher holds the store, and reports a worker's death to the others at once.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from offbeat.errors import LaunchError
from offbeat.worlds.processes.elastic.registry import MEMBER, RENDEZVOUS, report_death
from offbeat.worlds.processes.launcher import IMPORTED, START_METHOD, _entry, start_fork_server, threads_for
from offbeat.worlds.processes.listen_store import listen_store
from offbeat.worlds.processes.server.auth import TOKEN

EXIT_S = 10.0  # for a worker to end after it was asked to


def launch_elastic(workers: int, restarts: int, function: Callable[..., Any], *args: Any) -> list[str]:
    """Run `function(*args)` in `workers` new processes, started again up to `restarts` times each.

    Wait for all; return what was said of failures. Raise an error if no worker ended well.
    """
    return _Supervision(workers, restarts, function, args).run()


class _Supervision:
    def __init__(
        self, workers: int, restarts: int, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        self._workers = workers
        self._threads = threads_for(workers)
        self._token = os.environ.get(TOKEN) or secrets.token_hex(32)  # with which workers sign their texts
        self._restarts = restarts
        self._function = function
        self._args = args
        self._store = listen_store("127.0.0.1", 0)
        self._context: Any = multiprocessing.get_context(START_METHOD)
        needed = {getattr(value, "__module__", None) or "offbeat" for value in (function, *args)}
        start_fork_server([*IMPORTED, *sorted(needed)])
        self._running: dict[int, tuple[Any, str]] = {}  # by rank: its process and name
        self._starts = [0] * workers
        self._ended_well = False
        self._notes: list[str] = []

    def run(self) -> list[str]:
        try:
            for rank in range(self._workers):
                self._start(rank)
            while self._running:
                ready = wait([process.sentinel for process, _ in self._running.values()])
                for rank, (process, member) in list(self._running.items()):
                    if process.sentinel in ready:
                        process.join()
                        code = process.exitcode
                        process.close()
                        self._on_exit(rank, code, member)
        finally:
            self._terminate()
        if not self._ended_well:
            raise LaunchError(f"no worker ended well: {'; '.join(self._notes)}; their output is above")
        return self._notes

    def _start(self, rank: int) -> None:
        member = f"rank{rank:04}-{self._starts[rank]}"  # members are sorted by name
        self._starts[rank] += 1
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self._workers),
            RENDEZVOUS: f"127.0.0.1:{self._store.port}",
            MEMBER: member,
            TOKEN: self._token,
        }
        process = self._context.Process(
            target=_run, args=(environment, self._threads, self._function, self._args), daemon=True
        )
        process.start()
        self._running[rank] = (process, member)

    def _on_exit(self, rank: int, code: int, member: str) -> None:
        del self._running[rank]
        report_death(self._store, member)
        if code == 0:
            self._ended_well = True
            return
        ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
        again = not self._ended_well and self._starts[rank] <= self._restarts
        self._notes.append(f"rank {rank} {ended}")
        said = f"{self._notes[-1]}{', starting it again' if again else ''}"
        sys.stderr.write(f"{said} ({len(self._running)} workers go on)\n")
        if again:
            self._start(rank)

    def _terminate(self) -> None:
        for process, _ in self._running.values():
            process.terminate()
        for process, _ in self._running.values():
            process.join(EXIT_S)
            process.kill()


def _run(
    environment: dict[str, str], threads: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ.update(environment)
    _entry(os.environ[TOKEN], threads, function, args)
