"""Connecting to a shard: encrypted where it must be, and both ends prove that they know the token."""

from __future__ import annotations

import socket

from offbeat.errors import OffbeatError
from offbeat.worlds.processes.server.auth import TOKEN, prove
from offbeat.worlds.processes.server.connection import Connection
from offbeat.worlds.processes.server.discovery import INSECURE, ShardAddress


def dial(address: ShardAddress, name: str, patience_s: float, silence_s: float, insecure: bool) -> Connection:
    """Connect to the shard `name`; each send and receive may block for `patience_s`."""
    connection = Connection(socket.create_connection(address.endpoint, timeout=patience_s), silence_s)
    connection.limit(patience_s)
    if address.encrypted:
        connection.encrypt()
    elif not insecure and not connection.is_loopback:
        connection.close()
        raise OffbeatError(
            f"{name} does not encrypt its connections: start it without {INSECURE}, "
            f"or accept that by {INSECURE}=1 for this worker, too"
        )
    return connection


def authenticate(connection: Connection, name: str, token: bytes) -> None:
    """Prove to a shard that this process knows the token; raise an error if the shard does not."""
    if not prove(connection, token):
        raise OffbeatError(
            f"{name} does not know this worker's token: check {TOKEN} "
            "(a connection that another process relays is refused, too)"
        )
