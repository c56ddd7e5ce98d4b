"""A link: one worker and one shard of the server, over a TCP connection of their own.

It fails alone: when a worker is killed, only its own links end, at once. What travels is a header of whole
numbers, then tensors whose sizes both ends know beforehand; nothing is unpickled, and nothing from the wire
says how much memory to take.

Before a link is used, each end proves to the other that it knows the token: an HMAC of what both have drawn.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from collections.abc import Iterator
from contextlib import suppress
from enum import IntEnum

import torch
from torch import Tensor

from offbeat.core.port import Op
from offbeat.server.messages import Tensors

TOKEN = "OFFBEAT_TOKEN"  # the environment variable
NOW = NEW = -1  # as the clock of a pull: whatever the weights are; of a join: none yet
HEADER = 4
PIECE_BYTES = 4 << 20
NONCE_BYTES = 32


class MessageType(IntEnum):
    """What a header announces."""

    JOIN = 1  # worker; clock, or NEW; pushes that were acknowledged
    WELCOME = 2  # clock, pushes lost, whether there are weights
    OPEN = 3  # part; weights to start with follow, or that part of what the optimizer keeps
    PUSH = 4  # clock, nanoseconds spent computing, form; an update follows
    RECEIPT = 5  # clock, whether it was refused, bytes as with WEIGHTS (0: not told)
    PULL = 6  # clock, or NOW; part
    WEIGHTS = 7  # clocks behind, bytes that the shard has sent to other hosts, a hint; weights follow
    LEAVE = 8
    TERM = 9  # number of the sum, elements, index in WAYS_TO_SUM; they follow
    TOTAL = 10  # number, bytes as with WEIGHTS; as many elements follow


MOST = 1 << 53  # of any number in a header
MOST_WORKERS = 1_000_000_000
MOST_FORMS = 1_000
MOST_PARTS = 8  # that an optimizer may keep
NOTHING, ANY = (0, 0), (0, MOST)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WAYS_TO_SUM = [(dtype, op) for dtype in DTYPES for op in Op]
FROM_WORKERS = {  # the least and the most of each number
    MessageType.JOIN: ((0, MOST_WORKERS), (NEW, MOST), ANY),
    MessageType.OPEN: ((0, MOST_PARTS), NOTHING, NOTHING),
    MessageType.PUSH: ((1, MOST), ANY, (0, MOST_FORMS)),
    MessageType.PULL: ((NOW, MOST), (0, MOST_PARTS), NOTHING),
    MessageType.TERM: ((1, MOST), ANY, (0, len(WAYS_TO_SUM) - 1)),
    MessageType.LEAVE: (NOTHING, NOTHING, NOTHING),
}


class Connection:
    """One end of a link. Sending and receiving block; another thread can end both."""

    def __init__(self, connection: socket.socket, patience_s: float) -> None:
        self._connection = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A machine that vanishes says no goodbye: what it does not acknowledge for so long has not arrived.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            ("TCP_USER_TIMEOUT", int(1000 * patience_s)),
            ("TCP_KEEPIDLE", max(1, int(patience_s / 2))),
            ("TCP_KEEPINTVL", max(1, int(patience_s / 8))),
        ):
            if hasattr(socket, option):  # not every system has them
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self.limit(None)

    def limit(self, patience_s: float | None) -> None:
        """How long the other end may take for its next bytes. None: as long as it is there."""
        self._connection.settimeout(patience_s)

    def send(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            self._connection.sendall(_bytes_of(tensor))

    def receive(self, *tensors: Tensor) -> None:
        for _ in self.coming(*tensors):
            pass

    def coming(self, *tensors: Tensor) -> Iterator[Tensor]:
        """Receive piece by piece: one can be looked at while the next travels."""
        for tensor in tensors:
            for piece in tensor.split(max(1, PIECE_BYTES // tensor.element_size())) if tensor.numel() else ():
                self._fill(_bytes_of(piece))
                yield piece

    def _fill(self, room: memoryview) -> None:
        while room:
            count = self._connection.recv_into(room, len(room), socket.MSG_WAITALL)
            if not count:
                raise ConnectionResetError("the other end is gone")
            room = room[count:]

    def end(self) -> None:
        """No more of it, whatever other threads are waiting for."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Once no other thread uses it."""
        self.end()
        self._connection.close()


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().view(torch.uint8).numpy().data


def reduce_capacity(shares: Tensors) -> int:
    """The most bytes of one term at a shard that owns such shares: a gradient with its marks, or less."""
    return 2 * sum(share.nbytes for share in shares) + (1 << 16)


class ProtocolError(RuntimeError):
    """What came is not of this protocol, or not in its place."""


def read_header(link: Connection) -> tuple[MessageType, int, int, int]:
    """A worker's header: its kind and its numbers."""
    heard = torch.zeros(HEADER, dtype=torch.int64)
    link.receive(heard)
    return check_header(heard)


def check_header(heard: Tensor) -> tuple[MessageType, int, int, int]:
    """Checked, before anything is done about it."""
    kind, *numbers = heard.tolist()
    if kind not in FROM_WORKERS:
        raise ProtocolError(f"a header of kind {kind}")
    for number, (least, most) in zip(numbers, FROM_WORKERS[kind], strict=True):
        if not least <= number <= most:
            raise ProtocolError(f"{MessageType(kind).name} with the numbers {', '.join(map(str, numbers))}")
    first, second, third = numbers
    return MessageType(kind), first, second, third


def encode_header(kind: MessageType, *numbers: int) -> Tensor:
    return torch.tensor([kind, *numbers, *[0] * (HEADER - 1 - len(numbers))], dtype=torch.int64)


# --- who may join


def challenge(link: Connection, token: bytes) -> bool:
    """The server's side: does the other end know the token? It is told that this one does, or nothing."""
    ours = secrets.token_bytes(NONCE_BYTES)
    link.send(_tensor(ours))
    theirs, proof = _receive(link, NONCE_BYTES), _receive(link, hashlib.sha256().digest_size)
    known = hmac.compare_digest(proof, _proof(token, b"worker", ours, theirs))
    answer = _proof(token, b"server", theirs, ours)
    link.send(_tensor(answer if known else bytes(len(answer))))
    return known


def prove(link: Connection, token: bytes) -> bool:
    """The worker's side: do both ends know the same token?"""
    ours, theirs = secrets.token_bytes(NONCE_BYTES), _receive(link, NONCE_BYTES)
    link.send(_tensor(ours + _proof(token, b"worker", theirs, ours)))
    answer = _receive(link, hashlib.sha256().digest_size)
    return hmac.compare_digest(answer, _proof(token, b"server", ours, theirs))


def _proof(token: bytes, *parts: bytes) -> bytes:
    return hmac.new(token, b"".join(parts), hashlib.sha256).digest()


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _receive(link: Connection, nbytes: int) -> bytes:
    room = torch.zeros(nbytes, dtype=torch.uint8)
    link.receive(room)
    return bytes(room.tolist())
