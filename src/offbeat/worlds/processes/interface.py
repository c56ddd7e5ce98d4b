"""Network interface on which gloo listens for other ranks: one that other hosts can reach.

Gloo listens where this host's own name leads to. On many systems that is loopback, by a line in /etc/hosts,
and ranks of other hosts are told to connect to themselves. Then the interface towards the store is taken,
which all ranks reach.
"""

from __future__ import annotations

import os
import socket
import struct
import sys

from offbeat.worlds.processes.listen_store import is_loopback

GLOO = "GLOO_SOCKET_IFNAME"  # the environment variable that gloo reads
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux


def choose_interface(host: str, tcp_port: int) -> None:
    """Let gloo listen on the interface towards this host, where its own choice would be loopback."""
    if GLOO in os.environ or not is_loopback(_address_by_name()):
        return
    try:
        towards = local_address_towards(host, tcp_port)
    except OSError:  # who connects to it will say so
        return
    if not is_loopback(towards) and (name := _interface_of(towards)):
        os.environ[GLOO] = name


def local_address_towards(host: str, tcp_port: int) -> str:
    """Return this host's address on the route to another one. Nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, tcp_port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        own: str = probe.getsockname()[0]
    return own


def _address_by_name() -> str:
    """Return the address that gloo takes by itself: the first of this host's name on which it can listen."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    for family, kind, _, _, address in found:
        try:
            with socket.socket(family, kind) as listener:
                listener.bind(address)
        except OSError:
            continue
        return str(address[0])
    return "127.0.0.1"


def _interface_of(address: str) -> str:
    """Return the name of the interface that has this IPv4 address; empty if there is none."""
    if sys.platform != "linux":
        return ""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe, _ADDRESS_OF_INTERFACE, request)
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""
