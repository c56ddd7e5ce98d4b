"""Launcher of a case: forks this process, which has imported torch and loaded the data, once per host.

Starting Python, importing torch and loading the data would take longer than many cases.
"""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.support.hosts import Hosts

FIRST_PORT, PORTS = 20_000, 5_000
FAILED_EXIT_S = 10.0  # to wait for the exit code of a failed rank
EXIT_S = 20.0  # to wait for ranks that are done
LAST_LINES = 12

_serial = itertools.count()


class CaseFailed(Exception):
    """A rank failed or timed out."""


def run(hosts: Hosts, function: Callable[[], Any], timeout_s: float) -> Any:
    """Run a function on all hosts; return its result on host 0. `CaseFailed` names the host that failed."""
    fork = multiprocessing.get_context("fork")
    port = str(FIRST_PORT + next(_serial) % PORTS)
    with tempfile.TemporaryDirectory(prefix="offbeat-peers-") as folder:
        logs = [Path(folder, str(host)) for host in range(hosts.count)]
        ends, processes = [], []
        for host in range(hosts.count):
            ours, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=_on_host, args=(hosts, host, port, logs[host], function, theirs))
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        try:
            return _collect(ends, processes, logs, timeout_s)
        finally:
            for process in processes:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid or 0, signal.SIGKILL)
                process.join()
            hosts.kill_all()  # servers and other processes that a contender has started


def _collect(ends: list[Any], processes: list[Any], logs: list[Path], timeout_s: float) -> Any:
    """Wait for the results of all hosts; return that of host 0."""
    deadline = time.monotonic() + timeout_s
    missing = {end: host for host, end in enumerate(ends)}
    results: dict[int, Any] = {}
    while missing:
        ready = wait(list(missing), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(f"host {host}" for host in sorted(missing.values()))
            raise CaseFailed(
                f"not done after {timeout_s:.0f} s: {late}; {_tail(logs[min(missing.values())])}"
            )
        for end in ready:
            host = missing.pop(end)
            try:
                results[host] = end.recv()
            except EOFError:
                processes[host].join(FAILED_EXIT_S)
                code = processes[host].exitcode
                raise CaseFailed(f"host {host} ended with code {code}; {_tail(logs[host])}") from None
    for process in processes:
        process.join(EXIT_S)
    return results[0]


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(lines[-LAST_LINES:])


def _on_host(
    hosts: Hosts, host: int, port: str, log: Path, function: Callable[[], Any], end: Connection
) -> None:
    """Run the function in a forked process on a host, and send its result."""
    os.setsid()  # Ctrl-C reaches only the parent, and one signal kills this process with its children
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the parent
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    os.environ.update({**hosts.environment(host), "MASTER_PORT": port})
    code = 1
    try:
        with hosts.enter(host):
            end.send(function())
            code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # do not wait for threads of libraries
