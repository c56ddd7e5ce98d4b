"""Discovery: a shard publishes the address at which it listens in the store, and workers look it up."""

from __future__ import annotations

import ipaddress
import os
import socket

from offbeat.worlds.processes.store import DeadlineStore

ADDRESS = "OFFBEAT_ADDRESS"  # the environment variable: where other hosts reach this one
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def register(store: DeadlineStore, shard: int, host: str, tcp_port: int) -> socket.socket:
    """Listen for workers, and publish the address; `host` and `tcp_port` are those of the store.

    The address is that of this host on the route to the store: hosts that share a store share a network.
    A shard on the store's own host publishes no host name: workers already know that host, possibly by a
    name that is different on their network.
    """
    own = os.environ.get(ADDRESS) or _local_address_towards(host, tcp_port)
    beside_store = not os.environ.get(ADDRESS) and ipaddress.ip_address(own).is_loopback
    bound = ("127.0.0.1" if host in LOOPBACK else "") if beside_store else own
    family = socket.AF_INET6 if ":" in bound else socket.AF_INET
    listener = socket.create_server((bound, 0), family=family, backlog=128)
    store.set(_key(shard), f"{'' if beside_store else own} {listener.getsockname()[1]}")
    return listener


def resolve(store: DeadlineStore, shard: int, host: str) -> tuple[str, int] | None:
    """Return a shard's address, for a worker that knows the store as `host`. None: not published yet."""
    if not store.check([_key(shard)]):
        return None
    published, tcp_port = store.get(_key(shard)).decode().split(" ")
    return published or host, int(tcp_port)


def _key(shard: int) -> str:
    return f"address/{shard}"


def _local_address_towards(host: str, tcp_port: int) -> str:
    """Return this host's address on the route to another one. Nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, tcp_port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        own: str = probe.getsockname()[0]
    return own
