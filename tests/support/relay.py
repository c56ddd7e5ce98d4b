"""A man in the middle: forwards the handshake between a worker and a shard, then speaks for the worker."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Any

import torch

from offbeat.worlds.processes.server.connection import Connection
from tests.support.beside import beside
from tests.support.limits import HANG_S

NONCE = PROOF = 32


class Relay:
    """Listens where the worker is led to, and connects to the shard.

    `certificate` is the relay's own: with one, it speaks TLS to both ends, and reads what they say.
    """

    def __init__(
        self, shard: tuple[str, int], take_over: Callable[[Connection], None], certificate: Any = None
    ) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self.done = beside(self._relay, shard, take_over, certificate)

    def _relay(self, address: tuple[str, int], take_over: Any, certificate: Any) -> str:
        worker = Connection(self._listener.accept()[0], HANG_S)
        shard = Connection(socket.create_connection(address), HANG_S)
        if certificate is not None:
            worker.encrypt(certificate)
            shard.encrypt()
        try:
            for source, target, nbytes in (
                (shard, worker, NONCE),
                (worker, shard, NONCE + PROOF),
                (shard, worker, PROOF),
            ):
                said = torch.zeros(nbytes, dtype=torch.uint8)
                source.receive(said)
                target.send(said)
            take_over(shard)
            return "taken over"
        except OSError:
            return "refused"
        finally:
            worker.close()
            shard.close()
            self._listener.close()


class Wiretap:
    """Forwards all bytes between a worker and a shard, and keeps them."""

    def __init__(self, shard: tuple[str, int]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self.heard = bytearray()
        Thread(target=self._forward, args=(shard,), daemon=True).start()

    def _forward(self, address: tuple[str, int]) -> None:
        with self._listener, self._listener.accept()[0] as worker, socket.create_connection(address) as shard:
            back = Thread(target=self._copy, args=(shard, worker), daemon=True)
            back.start()
            self._copy(worker, shard)
            back.join()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while said := source.recv(1 << 16):
                self.heard += said
                target.sendall(said)
            target.shutdown(socket.SHUT_WR)
