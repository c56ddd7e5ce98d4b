"""A stranger on a host of its own: sends rubbish to every port that is claimed to be closed to it."""

from __future__ import annotations

import socket
import subprocess
from contextlib import suppress
from random import Random
from threading import Event, Thread

from benchmarks.support.hosts import Hosts
from benchmarks.support.malformed import bytes_of, mutate
from offbeat.worlds.processes.server.wire import MessageType, encode_header

EVERY_S = 0.1
LOOK_EVERY = 50  # knocks, between looks at the ports that are open


class Stranger:
    """A thread that knocks until it is told to stop."""

    def __init__(self, hosts: Hosts, own: int, targets: range, only_port: int | None) -> None:
        """`only_port`: knock there only, where other ports are not claimed to be closed (gloo's)."""
        self.knocks = 0
        self._hosts, self._own, self._targets, self._only_port = hosts, own, targets, only_port
        self._ended = Event()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        random = Random(1)
        join = bytes_of(encode_header(MessageType.JOIN, 1, 0, 0))
        ports: list[tuple[str, int]] = []
        with self._hosts.enter(self._own):
            while not self._ended.wait(EVERY_S):
                if self.knocks % LOOK_EVERY == 0:
                    ports = self._open_ports()
                self.knocks += 1
                if not ports:
                    continue
                with suppress(OSError), socket.create_connection(random.choice(ports), timeout=1.0) as link:
                    link.sendall(mutate(random, bytes(64) + join))

    def _open_ports(self) -> list[tuple[str, int]]:
        found = []
        for host in self._targets:
            listing = ["ip", "netns", "exec", self._hosts.namespace(host), "ss", "-Hltn"]
            lines = subprocess.run(listing, capture_output=True, text=True, check=False).stdout.splitlines()
            for line in lines:
                port = int(line.split()[3].rpartition(":")[2])
                if self._only_port in (None, port):
                    found.append((self._hosts.address(host), port))
        return found
