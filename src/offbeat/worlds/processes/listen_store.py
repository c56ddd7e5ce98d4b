"""Stores that Offbeat itself starts, which listen only where they are told to.

torch's own TCPStore listens on all interfaces, whatever host it is given: a store has no password, so who
reaches it can read and write it.
"""

from __future__ import annotations

import ipaddress
import socket

import torch.distributed as dist

from offbeat.errors import LaunchError

LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")


def listen_store(host: str, tcp_port: int, multi_tenant: bool = False) -> dist.TCPStore:
    """Start a store at this address only; port 0: any free one.

    With `multi_tenant`, a master that this process starts at the same port shares the store.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, tcp_port, type=socket.SOCK_STREAM)[0]
        if not is_loopback(host) and ipaddress.ip_address(address[0]).is_loopback:
            raise LaunchError(
                f"on this host {host} means {address[0]}, which no other host can reach: "
                "give the address of a network interface, or 127.0.0.1"
            )
        listener = socket.create_server((str(address[0]), tcp_port), family=family, backlog=2048)
    except OSError as problem:
        raise LaunchError(f"cannot listen at {host}:{tcp_port}: {problem}") from None
    tcp_port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        tcp_port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=multi_tenant,
        master_listen_fd=listener.detach(),  # now the store's, which closes it
    )


def is_loopback(host: str) -> bool:
    """Return whether a host is written as loopback: a host's own name does not count, whatever it means."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in LOOPBACK_NAMES
