"""Launcher of local workers, built on torch's elastic launcher. Under torchrun nothing is launched."""

from __future__ import annotations

import logging
import multiprocessing
import os
import secrets
import signal
import sys
import threading
import uuid
from collections.abc import Callable
from multiprocessing import forkserver
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from offbeat.errors import LaunchError, OffbeatError
from offbeat.worlds.processes.cores import usable_cores
from offbeat.worlds.processes.listen_store import listen_store
from offbeat.worlds.processes.server.auth import TOKEN
from offbeat.worlds.processes.server.bootstrap import SERVER

# Workers are forked from a process that has imported all they need, so of many runs only the first one waits
# for imports. That process has one thread and touches no GPU. Only on Linux is a fork safe with torch.
START_METHOD = "forkserver" if sys.platform == "linux" else "spawn"
IMPORTED = (
    "torch._dynamo",
    "offbeat.attach",
    "offbeat.strategies",
)  # torch imports _dynamo when the first optimizer is made

THREADS = "OMP_NUM_THREADS"
HEED_INTERRUPTS = "offbeat.worlds.processes.heed_interrupts"


def under_launcher() -> bool:
    """Return True if a launcher has started this process as one of several ranks."""
    return "RANK" in os.environ


def workers_of_environment() -> int:
    """Return the number of workers that the launcher has started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def threads_for(workers: int) -> int:
    """Return the threads of each worker: as many as OMP_NUM_THREADS says, or else its part of the cores.

    By default every worker would start a thread per core, and the workers would wait for each other.
    """
    asked = os.environ.get(THREADS, "").partition(",")[0]  # what follows is for nested loops
    return int(asked) if asked.isdecimal() else max(1, usable_cores() // workers)


def start_fork_server(modules: list[str]) -> None:
    """Start the process that workers are forked from; Ctrl-C does not interrupt its imports.

    It reaches all processes of a terminal: the launcher answers, and this process would show a traceback.
    """
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    multiprocessing.set_forkserver_preload(modules if ignored else [*modules, HEED_INTERRUPTS])
    if START_METHOD != "forkserver" or threading.current_thread() is not threading.main_thread():
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which the new process inherits
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


def launch(workers: int, function: Callable[..., Any], *args: Any) -> None:
    """Run `function(*args)` in `workers` new processes, the ranks of one process group; wait for all."""
    threads = threads_for(workers)
    store = listen_store("127.0.0.1", 0, multi_tenant=True)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        # Of torch's backends this one starts no store but that at its endpoint, which is ours.
        rdzv_backend="static",
        rdzv_endpoint=f"127.0.0.1:{store.port}",
        rdzv_configs={"rank": 0},
        local_addr="127.0.0.1",
        max_restarts=0,
        start_method=START_METHOD,
    )
    # The token of a server that the workers start; that of a dedicated server can only be given.
    token = os.environ.get(TOKEN) or ("" if os.environ.get(SERVER) else secrets.token_hex(32))
    needed = {getattr(value, "__module__", None) or "offbeat" for value in (function, *args)}
    start_fork_server([*IMPORTED, *sorted(needed)])
    # Workers print their own errors, and LaunchError names the rank; the launcher's log would bury both.
    for name in list(logging.root.manager.loggerDict):  # each logger has a level of its own
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing.spawn")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        elastic_launch(config, _entry)(token, threads, function, args)
    except SignalException as interrupted:
        raise KeyboardInterrupt from interrupted
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        code = failure.exitcode
        if code == -signal.SIGKILL:  # which leaves it no time to say anything
            why = "was ended by SIGKILL: by somebody, or by the system, whose memory was full (see dmesg)"
            raise LaunchError(f"rank {rank} {why}") from None
        ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
        raise LaunchError(f"rank {rank} {ended}; its output is above") from None


def _entry(token: str, threads: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Run `function` in a new process: print Offbeat's errors without a traceback, and unwind on SIGTERM."""
    os.environ[TOKEN] = token
    os.environ[THREADS] = str(threads)
    torch.set_num_threads(threads)  # the process that this one was forked from may have had another number
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        function(*args)
    except OffbeatError as error:
        sys.stderr.write(f"rank {os.environ['RANK']}: {error}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
