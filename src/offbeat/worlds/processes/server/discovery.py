"""Discovery: a shard publishes in the store where it listens and that it has weights; workers look it up.

All that is published is signed: a worker refuses an address that the shard has not written itself.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass

from offbeat.worlds.processes.interface import local_address_towards
from offbeat.worlds.processes.listen_store import LOOPBACK_NAMES, is_loopback
from offbeat.worlds.processes.server.signed_store import SignedStore
from offbeat.worlds.processes.store import DeadlineStore

ADDRESS = "OFFBEAT_ADDRESS"  # the environment variable: where other hosts reach this one
INSECURE = "OFFBEAT_INSECURE"  # the environment variable: do not encrypt connections between hosts


@dataclass(frozen=True)
class ShardAddress:
    """Address of a shard, and whether it speaks TLS there."""

    host: str
    tcp_port: int
    encrypted: bool

    @property
    def endpoint(self) -> tuple[str, int]:
        """The address as sockets take it."""
        return self.host, self.tcp_port


def register(
    store: DeadlineStore, token: bytes, shard: int, host: str, tcp_port: int, insecure: bool = False
) -> tuple[socket.socket, bool]:
    """Listen for workers, and publish the address; `host` and `tcp_port` are those of the store.

    Return the listening socket, and whether its connections are encrypted: where other hosts can reach it,
    unless `insecure`.

    The address is that of this host on the route to the store: hosts that share a store share a network.
    A shard on the store's own host publishes no host name: workers already know that host, possibly by a
    name that is different on their network.
    """
    own = os.environ.get(ADDRESS) or local_address_towards(host, tcp_port)
    beside_store = not os.environ.get(ADDRESS) and ipaddress.ip_address(own).is_loopback
    bound = _beside_store(host) if beside_store else own
    encrypted = not insecure and not is_loopback(bound)
    family = socket.AF_INET6 if ":" in bound else socket.AF_INET
    listener = socket.create_server((bound, 0), family=family, backlog=128)
    protocol = "tls" if encrypted else "plain"
    address = f"{protocol} {listener.getsockname()[1]} {'' if beside_store else own}"
    SignedStore(store, token).set(_key(shard), address)
    return listener, encrypted


def resolve(store: DeadlineStore, token: bytes, shard: int, host: str) -> ShardAddress | None:
    """Return a shard's address, for a worker that knows the store as `host`. None: not published yet."""
    published = SignedStore(store, token).find(_key(shard))
    if published is None:
        return None
    protocol, tcp_port, own = published.split(" ")
    return ShardAddress(own or host, int(tcp_port), encrypted=protocol == "tls")


def publish_failure(store: DeadlineStore, token: bytes, shard: int, reason: str) -> None:
    """Publish that a shard has ended, and will not be started again."""
    SignedStore(store, token).set(f"failed/{shard}", reason)


def failure(store: DeadlineStore, token: bytes, shard: int) -> str | None:
    """Return why a shard will not be started again; None if it is there, or will be."""
    return SignedStore(store, token).find(f"failed/{shard}")


def publish_weights(store: DeadlineStore, token: bytes, shard: int) -> None:
    """Publish that a shard has weights: one that has none later has lost them."""
    SignedStore(store, token).set(f"weights/{shard}", "loaded")


def has_had_weights(store: DeadlineStore, token: bytes, shard: int) -> bool:
    """Return whether a shard has had weights in this run."""
    return SignedStore(store, token).find(f"weights/{shard}") is not None


def _key(shard: int) -> str:
    return f"address/{shard}"


def _beside_store(host: str) -> str:
    """Return the address to listen at on the store's own host: no more hosts reach it than the store."""
    if host in LOOPBACK_NAMES:
        return "127.0.0.1"
    return host if is_loopback(host) else ""
