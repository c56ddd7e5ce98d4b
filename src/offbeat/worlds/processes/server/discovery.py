"""Addresses: where a shard listens, and how workers learn of it: from the store, under the shard's number."""

from __future__ import annotations

import ipaddress
import os
import socket

import torch.distributed as dist

ADDRESS = "OFFBEAT_ADDRESS"  # the environment variable: where other hosts reach this one
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def register(store: dist.Store, shard: int, host: str, port: int) -> socket.socket:
    """Open a door for workers and put its address up. `host` and `port` are the store's.

    A shard is reached where the way from here to the store begins: hosts that share a store share a network.
    One that stands beside the store says no host: a worker knows that one by a name that works from where it
    is, which may not be what it is called here.
    """
    own = os.environ.get(ADDRESS) or _local_address_towards(host, port)
    beside_store = not os.environ.get(ADDRESS) and ipaddress.ip_address(own).is_loopback
    bound = ("127.0.0.1" if host in LOOPBACK else "") if beside_store else own
    family = socket.AF_INET6 if ":" in bound else socket.AF_INET
    listener = socket.create_server((bound, 0), family=family, backlog=128)
    store.set(_key(shard), f"{'' if beside_store else own} {listener.getsockname()[1]}")
    return listener


def resolve(store: dist.Store, shard: int, host: str) -> tuple[str, int] | None:
    """Where a shard is, for a worker that knows the store as `host`. None: nobody has put it up yet."""
    if not store.check([_key(shard)]):
        return None
    there, port = store.get(_key(shard)).decode().split(" ")
    return there or host, int(port)


def _key(shard: int) -> str:
    return f"address/{shard}"


def _local_address_towards(host: str, port: int) -> str:
    """This host's address on the way to another one. Nothing is sent."""
    family, kind, _, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(there)
        own: str = probe.getsockname()[0]
    return own
