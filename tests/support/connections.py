"""Two ends of a real connection on loopback."""

from __future__ import annotations

import socket

from offbeat.worlds.processes.server.connection import Connection
from tests.support.limits import HANG_S


def connection_pair() -> tuple[Connection, Connection]:
    """The server's and the worker's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        worker = socket.create_connection(listener.getsockname())
        return Connection(listener.accept()[0], HANG_S), Connection(worker, HANG_S)


def close(*both: Connection) -> None:
    for link in both:
        link.close()
