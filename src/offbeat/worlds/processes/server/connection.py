"""Connection between a worker and one shard of the server, over a TCP socket of its own.

Connections fail independently: when a worker is killed, only its own connections end, at once. A connection
is plain at first, and can continue over TLS.
"""

from __future__ import annotations

import ipaddress
import select
import socket
from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor

from offbeat.worlds.processes.server.tls import Certificate, TlsStream

PIECE_BYTES = 4 << 20
UNSENT_BYTES = 16 << 10  # that may still be unsent when all is said to have left
FLUSH_S = 10.0
UNLIMITED = -1  # as the most bytes that the kernel keeps unsent
HUNG_UP = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


class PlainStream:
    """Bytes on a connected socket, as they are."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, data: memoryview) -> None:
        self._socket.sendall(data)

    def fill(self, buffer: memoryview) -> None:
        while buffer:
            count = self._socket.recv_into(buffer, len(buffer), socket.MSG_WAITALL)
            if not count:
                raise ConnectionResetError("the other end is gone")
            buffer = buffer[count:]


class Connection:
    """One end of a connection. Sending and receiving block; another thread can end both."""

    def __init__(self, connection: socket.socket, patience_s: float) -> None:
        self._socket = connection
        self._stream: PlainStream | TlsStream = PlainStream(connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A machine that vanishes closes no connection: only missing acknowledgements reveal it.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            ("TCP_USER_TIMEOUT", int(1000 * patience_s)),
            ("TCP_KEEPIDLE", max(1, int(patience_s / 2))),
            ("TCP_KEEPINTVL", max(1, int(patience_s / 8))),
        ):
            if hasattr(socket, option):  # not every system has these options
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self.limit(None)

    def limit(self, patience_s: float | None) -> None:
        """Set the seconds that each send or receive may block; None: no limit while the other end lives."""
        self._socket.settimeout(patience_s)

    def encrypt(self, certificate: Certificate | None = None) -> None:
        """Continue over TLS. The shard's end has a certificate; both ends call this before anything else."""
        try:
            self._stream = TlsStream(self._socket, certificate)
        except BaseException:
            self.close()
            raise

    def channel(self, server_side: bool) -> bytes:
        """Return what both ends know of this channel, but not of a channel through a third process."""
        if isinstance(self._stream, TlsStream):
            return b"tls " + self._stream.certificate_digest
        address = self._socket.getsockname() if server_side else self._socket.getpeername()
        return b"tcp %d" % address[1]

    @property
    def is_loopback(self) -> bool:
        """True if the other end is reached by loopback, which no other host can read."""
        return ipaddress.ip_address(self._socket.getpeername()[0]).is_loopback

    @property
    def stays_on_host(self) -> bool:
        """True if the other end is on this host, reached by loopback or by the host's own address."""
        return self.is_loopback or self._socket.getsockname()[0] == self._socket.getpeername()[0]

    @property
    def is_hung_up(self) -> bool:
        """True if the other end has closed the connection."""
        poll = select.poll()
        poll.register(self._socket, HUNG_UP)
        return bool(poll.poll(0))

    def send(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            self._stream.send(_bytes_of(tensor))

    def flush(self) -> None:
        """Wait until nearly all that was sent has left this host's buffers, where the system can tell."""
        if not hasattr(socket, "TCP_NOTSENT_LOWAT"):
            return
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        poll.poll(1000 * FLUSH_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNLIMITED)

    def receive(self, *tensors: Tensor) -> None:
        """Fill the tensors with bytes from the other end."""
        for _ in self.receive_pieces(*tensors):
            pass

    def receive_pieces(self, *tensors: Tensor) -> Iterator[Tensor]:
        """Fill the tensors piece by piece: a piece can be checked while the next one travels."""
        for tensor in tensors:
            for piece in tensor.split(max(1, PIECE_BYTES // tensor.element_size())) if tensor.numel() else ():
                self._stream.fill(_bytes_of(piece))
                yield piece

    def fileno(self) -> int:
        """Return the socket's descriptor, to poll it."""
        return self._socket.fileno()

    def end_sending(self) -> None:
        """Send nothing more; the other end reads all that was sent, and can still answer."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def end(self) -> None:
        """Shut the connection down, also for threads that are blocked in it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Release the socket, once no other thread uses it."""
        self.end()
        self._socket.close()


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().view(torch.uint8).numpy().data
