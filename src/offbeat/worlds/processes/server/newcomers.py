"""Connections that have not joined yet: few at a time, and none of them for long.

Anybody who reaches the port can open connections. So their number is bounded: a new one ends the oldest,
since a worker needs milliseconds to join and whoever does not join stays. Each has one deadline for
everything that it sends, however slowly.
"""

from __future__ import annotations

import time
from contextlib import suppress
from threading import Condition, Lock
from typing import Protocol

from offbeat.server.server import ParameterServer
from offbeat.worlds.processes.server.attendance import Attendance
from offbeat.worlds.processes.server.auth import challenge
from offbeat.worlds.processes.server.connection import Connection
from offbeat.worlds.processes.server.looks import Looks
from offbeat.worlds.processes.server.session import WorkerSession
from offbeat.worlds.processes.server.tls import Certificate
from offbeat.worlds.processes.server.wire import (
    FIRST,
    FROM_SHARDS,
    FROM_WORKERS,
    MessageType,
    ProtocolError,
    encode_header,
    read_header,
)

MOST = 64
JOIN_TIMEOUT_S = 10.0  # for a new connection to authenticate and join


class Newcomers:
    """The connections of one shard that have not joined yet."""

    def __init__(self) -> None:
        self._since: dict[Connection, float] = {}  # in the order of arrival
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._since)

    def add(self, connection: Connection) -> None:
        """Add a connection; end the oldest if there are too many."""
        with self._lock:
            if len(self._since) >= MOST:
                oldest = next(iter(self._since))
                del self._since[oldest]
                oldest.end()
            self._since[connection] = time.monotonic()

    def remove(self, connection: Connection) -> None:
        """Remove a connection that has joined or ended."""
        with self._lock:
            self._since.pop(connection, None)

    def end_late(self) -> None:
        """End the connections that have not joined in time."""
        with self._lock:
            late_s = time.monotonic() - JOIN_TIMEOUT_S
            for connection in [each for each, since_s in self._since.items() if since_s < late_s]:
                del self._since[connection]
                connection.end()


def receive_first(
    connection: Connection, certificate: Certificate | None, token: bytes
) -> tuple[MessageType, int, int, int] | None:
    """Authenticate a new connection; return the header that it begins with. None: it has another token."""
    connection.limit(JOIN_TIMEOUT_S)  # for each byte; `Newcomers` ends it in all
    if certificate is not None:
        connection.encrypt(certificate)
    if not challenge(connection, token):
        return None
    first = read_header(connection, {**FROM_WORKERS, **FROM_SHARDS})
    if first[0] not in FIRST:
        raise ProtocolError(f"{first[0].name} before JOIN")
    connection.limit(None)
    return first


class Readable(Protocol):
    """The shard, as a connection that only asks a question sees it."""

    changed: Condition
    server: ParameterServer
    attendance: Attendance
    looks: Looks
    sessions: dict[int, WorkerSession]

    @property
    def has_weights(self) -> bool: ...


def answer_question(
    shard: Readable, connection: Connection, kind: MessageType, worker: int, clock: int, pushes: int
) -> None:
    """Answer a worker beside its session: its question for weights, or for its pushes; or let it look."""
    if kind is MessageType.READ:
        _send_weights(shard, connection)
    elif kind is MessageType.LOOK:
        _let_look(shard, connection, worker, clock / 1e9)
    else:
        with shard.changed:
            shard.attendance.note(worker, pushes)
            shard.changed.notify_all()
            lost = shard.server.count_lost(worker, clock, pushes)
        connection.send(encode_header(MessageType.JOIN_ACK, clock, lost, int(shard.has_weights)))


def _send_weights(shard: Readable, connection: Connection) -> None:
    with shard.changed:
        if not shard.changed.wait_for(lambda: shard.has_weights, JOIN_TIMEOUT_S):
            raise ConnectionAbortedError("there are no weights to read yet")
        weights = [weight.clone() for weight in shard.server.weights]
    connection.send(encode_header(MessageType.PULL_REPLY), *weights)


def _let_look(shard: Readable, connection: Connection, worker: int, ago_s: float) -> None:
    """Hold the others for as long as the connection lasts."""
    with shard.changed:
        shard.looks.begin(connection, worker, ago_s)
    try:
        connection.send(encode_header(MessageType.JOIN_ACK))
        with suppress(ConnectionError):  # which is its end
            read_header(connection)
    finally:
        with shard.changed:
            shard.looks.end(connection)
            if session := shard.sessions.get(worker):  # it paused itself, and was not silent
                shard.looks.forgive(session)
                session.heard_s = time.monotonic()
            shard.changed.notify_all()
