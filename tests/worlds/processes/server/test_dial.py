"""Connecting to a shard: not without encryption between hosts, and not to one with another token."""

from __future__ import annotations

import socket

import pytest

from offbeat.errors import OffbeatError
from offbeat.worlds.processes.server.auth import challenge
from offbeat.worlds.processes.server.connection import Connection
from offbeat.worlds.processes.server.dial import authenticate, dial
from offbeat.worlds.processes.server.discovery import ShardAddress
from tests.support.beside import beside
from tests.support.connections import close
from tests.support.limits import HANG_S


@pytest.mark.parametrize("insecure", [False, True])
def test_a_plain_connection_to_another_host_must_be_asked_for(
    monkeypatch: pytest.MonkeyPatch, insecure: bool
) -> None:
    monkeypatch.setattr(Connection, "is_loopback", False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = ShardAddress("127.0.0.1", listener.getsockname()[1], encrypted=False)
        if insecure:
            dial(address, "shard 0", HANG_S, HANG_S, insecure).close()
        else:
            with pytest.raises(OffbeatError, match="shard 0 does not encrypt its connections"):
                dial(address, "shard 0", HANG_S, HANG_S, insecure)


@pytest.mark.parametrize("token", [b"secret", b"guess"])
def test_both_ends_must_know_the_token(token: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = ShardAddress("127.0.0.1", listener.getsockname()[1], encrypted=False)
        worker = dial(address, "shard 0", HANG_S, HANG_S, insecure=False)
        shard = Connection(listener.accept()[0], HANG_S)
    asked = beside(challenge, shard, b"secret")
    if token == b"secret":
        authenticate(worker, "shard 0", token)
    else:
        with pytest.raises(OffbeatError, match="shard 0 does not know this worker's token"):
            authenticate(worker, "shard 0", token)
    assert asked.result(HANG_S) == (token == b"secret")
    close(worker, shard)
