"""A case on the hosts: this process, which has torch and the data already, is forked once for each host.

To start Python, import torch and read the data takes longer than many a case.
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

from benchmarks.hosts import Hosts

FIRST_PORT, PORTS = 20_000, 5_000
PATIENCE_S = 10.0  # for the others to end by themselves, once one has failed
END_S = 20.0  # to end, for those that are done
LAST_LINES = 12

_serial = itertools.count()


class CaseFailed(Exception):
    """A rank failed, or did not end in time."""


def run(hosts: Hosts, function: Callable[[], Any], timeout_s: float) -> Any:
    """What `function` returns on host 0, after it ran on all. A failure names the host that failed first."""
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
            hosts.end_all()  # servers, and whatever else a contender has started


def _collect(ends: list[Any], processes: list[Any], logs: list[Path], timeout_s: float) -> Any:
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
                processes[host].join(PATIENCE_S)
                code = processes[host].exitcode
                raise CaseFailed(f"host {host} ended with code {code}; {_tail(logs[host])}") from None
    for process in processes:
        process.join(END_S)
    return results[0]


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(lines[-LAST_LINES:])


def _on_host(
    hosts: Hosts, host: int, port: str, log: Path, function: Callable[[], Any], end: Connection
) -> None:
    os.setsid()  # so that Ctrl-C reaches the parent only, and one signal ends this and all that it started
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: nothing is left if the parent is killed
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    os.environ.update({**hosts.environment(host), "MASTER_PORT": port})
    code = 1
    try:
        with hosts.inside(host):
            end.send(function())
            code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # libraries' threads may not want to end
