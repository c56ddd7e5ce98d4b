"""Orphans: a worker whose launcher was killed ends, instead of training on where nobody sees it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from threading import Lock, Thread

LAUNCHED = "TORCHELASTIC_RUN_ID"  # the environment variable that torchrun, and `offbeat train`, set
CHECK_S = 1.0
UNWIND_S = 10.0  # for the loop to end after SIGTERM, before the process is ended

_watching = Lock()  # held for ever by the thread that watches


def watch_launcher() -> None:
    """Watch, from a thread, the launcher that has started this process, and end with it."""
    if LAUNCHED in os.environ and _watching.acquire(blocking=False):
        Thread(target=end_with_parent, args=(os.getppid(),), name="launcher", daemon=True).start()


def end_with_parent(parent: int, end: Callable[[int], None] = os._exit) -> None:
    """Wait until the parent process has died; then say so, and end this process.

    Where multiprocessing has started this process, the parent may be a server that forks, and outlives the
    launcher; multiprocessing knows the launcher itself.
    """
    launcher = multiprocessing.parent_process()
    while os.getppid() == parent and (launcher is None or launcher.is_alive()):
        time.sleep(CHECK_S)
    rank = os.environ.get("RANK", "?")
    pid = parent if launcher is None else launcher.pid
    sys.stderr.write(f"offbeat: rank {rank} ends: its launcher (process {pid}) has died\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(UNWIND_S)
    end(1)
