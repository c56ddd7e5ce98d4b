"""Discovery: the address at which a shard listens, as workers learn it from the store."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from offbeat.worlds.processes.server import discovery as addresses
from offbeat.worlds.processes.server.discovery import ADDRESS, register, resolve

pytestmark = pytest.mark.processes


def test_a_shard_beside_the_store_is_reached_where_the_worker_found_the_store() -> None:
    store = dist.HashStore()
    assert resolve(store, 3, "anywhere") is None
    with register(store, 3, "localhost", 9) as listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.1", "it is not open to others"
        assert resolve(store, 3, "node-0.example") == ("node-0.example", port)


def test_a_shard_elsewhere_says_its_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback plays the network: every address that starts with 127 is this host's."""
    store = dist.HashStore()
    monkeypatch.setattr(addresses.ipaddress.IPv4Address, "is_loopback", False)
    with register(store, 0, "127.0.0.1", 9) as listener:
        assert resolve(store, 0, "node-0.example") == listener.getsockname()


def test_a_user_can_say_where_a_host_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setenv(ADDRESS, "127.0.0.7")
    with register(store, 0, "localhost", 9) as listener:
        assert resolve(store, 0, "elsewhere") == ("127.0.0.7", listener.getsockname()[1])


def test_beside_a_store_that_others_reach_by_name_a_shard_is_open_to_them() -> None:
    store = dist.HashStore()
    with register(store, 0, "127.0.1.1", 9) as listener:  # as Debian calls a host itself
        assert listener.getsockname()[0] == "0.0.0.0"
        assert resolve(store, 0, "node-0") == ("node-0", listener.getsockname()[1])
