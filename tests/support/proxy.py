"""A proxy on loopback, whose connections a test can reset, or let say nothing any more."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from threading import Event, Thread


class Proxy:
    """Forwards every connection to one address."""

    def __init__(self, host: str, tcp_port: int) -> None:
        self._to = (host, tcp_port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._forwards = Event()
        self._forwards.set()
        self._accepts = Thread(target=self._accept, daemon=True)
        self._accepts.start()

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def reset(self) -> None:
        """Send an RST over every connection; new ones are forwarded."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    end.shutdown(socket.SHUT_RD)  # wakes the thread that reads
                end.close()

    def swallow(self) -> None:
        """Forward nothing more, as a network that drops every packet."""
        self._forwards.clear()

    def forward(self) -> None:
        """Forward again."""
        self._forwards.set()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._accepts.join()
        self._listener.close()
        self.reset()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._to)
                self._pairs.append((client, server))
                for source, target in ((client, server), (server, client)):
                    Thread(target=self._copy, args=(source, target), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self._forwards.wait()
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
