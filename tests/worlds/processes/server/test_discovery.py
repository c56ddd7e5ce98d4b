"""Discovery: the address at which a shard listens, as workers learn it from the store."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch.distributed as dist

from offbeat.errors import OffbeatError
from offbeat.worlds.processes.server import discovery as addresses
from offbeat.worlds.processes.server.auth import sign
from offbeat.worlds.processes.server.discovery import ADDRESS, ShardAddress, register, resolve

pytestmark = pytest.mark.processes

TOKEN = b"secret"


def test_a_shard_beside_the_store_is_reached_where_the_worker_found_the_store() -> None:
    store = dist.HashStore()
    assert resolve(store, TOKEN, 3, "anywhere") is None
    listener, encrypted = register(store, TOKEN, 3, "localhost", 9)
    with listener:
        host, port = listener.getsockname()
        assert (host, encrypted) == ("127.0.0.1", False), "it is not open to others"
        assert resolve(store, TOKEN, 3, "node-0.example") == ShardAddress("node-0.example", port, False)


def test_beside_a_store_on_another_loopback_address_a_shard_is_open_there_only() -> None:
    store = dist.HashStore()
    listener, encrypted = register(store, TOKEN, 0, "127.0.0.2", 9)
    with listener:
        assert (listener.getsockname()[0], encrypted) == ("127.0.0.2", False)


def play_the_network(patch: pytest.MonkeyPatch) -> None:
    """Every address that starts with 127 is this host's, and taken for one that others reach."""
    patch.setattr(addresses.ipaddress.IPv4Address, "is_loopback", False)


@pytest.mark.parametrize("insecure", [False, True])
def test_a_shard_elsewhere_says_its_own_address_and_speaks_tls(
    monkeypatch: pytest.MonkeyPatch, insecure: bool
) -> None:
    store = dist.HashStore()
    play_the_network(monkeypatch)
    listener, encrypted = register(store, TOKEN, 0, "127.0.0.1", 9, insecure)
    with listener:
        assert encrypted is not insecure
        found = resolve(store, TOKEN, 0, "node-0.example")
        assert found == ShardAddress(*listener.getsockname(), encrypted)


def test_a_user_can_say_where_a_host_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setenv(ADDRESS, "127.0.0.7")
    listener, _ = register(store, TOKEN, 0, "localhost", 9)
    with listener:
        found = resolve(store, TOKEN, 0, "elsewhere")
        assert found is not None and found.endpoint == ("127.0.0.7", listener.getsockname()[1])


def test_beside_a_store_that_others_reach_by_name_a_shard_is_open_to_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on Debian, where a host's own name means 127.0.1.1."""
    look_up = socket.getaddrinfo

    def getaddrinfo(host: str, *rest: Any, **more: Any) -> Any:
        return look_up("127.0.1.1" if host == "node-0" else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    store = dist.HashStore()
    listener, encrypted = register(store, TOKEN, 0, "node-0", 9)
    with listener:
        assert (listener.getsockname()[0], encrypted) == ("0.0.0.0", True)
        found = resolve(store, TOKEN, 0, "node-0")
        assert found == ShardAddress("node-0", listener.getsockname()[1], True)


def test_an_address_that_a_stranger_has_written_is_refused() -> None:
    store = dist.HashStore()
    written = sign(TOKEN, "address/1", "plain 4000 ")
    for forged in (
        "plain 4000 10.0.0.66",
        "10.0.0.66 4000",
        sign(b"guess", "address/0", "plain 1 "),
        written,
        "",
    ):
        store.set("address/0", forged)
        with pytest.raises(OffbeatError, match="'address/0' in the store is not signed with this token"):
            resolve(store, TOKEN, 0, "127.0.0.1")
