"""Threads inside calls of torch that may not come back, and that nobody waits for.

Python ends a daemon thread by force when it comes back while the interpreter ends. If it comes back from C++
code, C++ then ends the whole process: "terminate called without an active exception". So the interpreter
gives those threads time first.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from threading import Thread

EXIT_S = 10.0  # for all threads together; one that is out longer hardly comes back just then

_running: set[Thread] = set()


def run_apart(name: str, function: Callable[..., object], *arguments: object) -> Thread:
    """Start a thread that only the end of the interpreter waits for, and not for ever."""
    _running.difference_update([thread for thread in _running if not thread.is_alive()])
    thread = Thread(target=function, args=arguments, name=name, daemon=True)
    thread.start()
    _running.add(thread)
    return thread


@atexit.register
def wait_for_all() -> None:
    """Wait until all threads that run apart have ended, or `EXIT_S` are over."""
    deadline = time.monotonic() + EXIT_S
    for thread in tuple(_running):
        thread.join(max(0.0, deadline - time.monotonic()))
