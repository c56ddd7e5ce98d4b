"""Ports for processes that must be told beforehand where to meet."""

from __future__ import annotations

import os
import socket
from itertools import count

LOWEST, COUNT = 20_000, 10_000  # below those that the system gives to sockets that ask for any
_tries = count(os.getpid() * 7)  # other test processes begin elsewhere


def free_port() -> int:
    """Find a port that is free, and stays so until it is used: the system gives it to nobody by chance."""
    while True:
        port = LOWEST + next(_tries) % COUNT
        try:
            socket.create_server(("", port)).close()
        except OSError:
            continue
        return port
