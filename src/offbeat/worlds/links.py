"""A link: one worker and one shard of the server, over a two-rank gloo group of their own.

It fails alone: when a worker is killed, only its own links raise. A worker that comes back makes new ones,
under new prefixes of the store. What travels is a header of whole numbers, then tensors whose sizes both ends
know beforehand; nothing is unpickled, and nothing from the wire says how much memory to take.

Before a link is used, the worker proves that it knows the token: the server sends a challenge, the worker its
HMAC.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TOKEN = "OFFBEAT_TOKEN"  # the environment variable
SERVER, WORKER = 0, 1
NOW = NEW = -1  # as the clock of a pull: whatever the weights are; of a join: none yet
HEADER = 4
PIECE_BYTES = 4 << 20
CHALLENGE_BYTES = 32
MOST_DIGITS = 9  # of a worker's number


class Kind(IntEnum):
    """What a header announces."""

    JOIN = 1  # clock, or NEW; pushes that were acknowledged
    WELCOME = 2  # clock, pushes lost, whether there are weights
    OPEN = 3  # weights to start with follow
    PUSH = 4  # clock, nanoseconds spent computing; an update follows
    RECEIPT = 5  # clock, whether it was refused
    PULL = 6  # clock, or NOW
    WEIGHTS = 7  # clocks behind, bytes that the shard has sent to other hosts; weights follow
    LEAVE = 8
    STRANGER = 9  # the token was not proven


FROM_WORKERS = frozenset((Kind.JOIN, Kind.OPEN, Kind.PUSH, Kind.PULL, Kind.LEAVE))
MOST = 1 << 53  # of any number in a header


class Link:
    """One end of a link."""

    def __init__(self, store: dist.Store, prefix: str, side: int, timeout_s: float) -> None:
        self._other = 1 - side
        self._group: Any = dist.ProcessGroupGloo(
            dist.PrefixStore(prefix, store), side, 2, timedelta(seconds=timeout_s)
        )

    def send(self, *tensors: Tensor) -> list[Any]:
        """Start to send; every returned work is to be waited for."""
        return [self._group.send([piece], self._other, 0) for piece in pieces(tensors)]

    def receive(self, *tensors: Tensor) -> list[Any]:
        return [self._group.recv([piece], self._other, 0) for piece in pieces(tensors)]

    def close(self) -> None:
        """The other end is told when the group is gone; aborted it would still hold the connection."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()


def pieces(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What travels is cut at the same places on both ends: a piece can be looked at while the next comes."""
    return [
        piece
        for tensor in tensors
        if tensor.numel()
        for piece in tensor.split(max(1, PIECE_BYTES // tensor.element_size()))
    ]


class Malformed(RuntimeError):
    """What came is not of this protocol, or not in its place."""


def parse(heard: Tensor) -> tuple[Kind, int, int]:
    """A worker's header: its kind and two numbers. Checked, before anything is done about it."""
    kind, first, second, rest = heard.tolist()
    if kind not in FROM_WORKERS:
        raise Malformed(f"a header of kind {kind}")
    lowest = NOW if kind in (Kind.JOIN, Kind.PULL) else 1 if kind == Kind.PUSH else 0
    if not lowest <= first <= MOST or not 0 <= second <= MOST or rest:
        raise Malformed(f"{Kind(kind).name} with the numbers {first}, {second}, {rest}")
    return Kind(kind), first, second


def header(kind: Kind, *numbers: int) -> Tensor:
    return torch.tensor([kind, *numbers, *[0] * (HEADER - 1 - len(numbers))], dtype=torch.int64)


def finish(works: Iterable[Any]) -> None:
    for work in works:
        work.wait()


# --- who may join


def challenge(link: Link, token: bytes) -> bool:
    """The server's side: does the other end know the token?"""
    nonce = secrets.token_bytes(CHALLENGE_BYTES)
    finish(link.send(_tensor(nonce)))
    answer = torch.zeros(hashlib.sha256().digest_size, dtype=torch.uint8)
    finish(link.receive(answer))
    return hmac.compare_digest(bytes(answer.tolist()), _proof(token, nonce))


def prove(link: Link, token: bytes) -> None:
    """The worker's side."""
    nonce = torch.zeros(CHALLENGE_BYTES, dtype=torch.uint8)
    finish(link.receive(nonce))
    finish(link.send(_tensor(_proof(token, bytes(nonce.tolist())))))


def _proof(token: bytes, nonce: bytes) -> bytes:
    return hmac.new(token, nonce, hashlib.sha256).digest()


def _tensor(data: bytes) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


# --- knocking


def knock(store: dist.Store, shard: int, worker: int) -> str:
    """Ask a shard for a link; the prefix under which it will be made.

    In one stroke, by appending: a worker that is killed in the middle must leave no gap in the list.
    """
    name = secrets.token_hex(8)
    store.append(f"knocks/{shard}", f"{worker}:{name};")  # type: ignore[attr-defined]
    return f"link/{shard}/{name}"


class Knocks:
    """A shard's side of it: those who knocked and have not been answered, even while nobody was here."""

    def __init__(self, store: dist.Store, shard: int) -> None:
        self._store = store
        self._shard = shard
        self._heard = store.add(f"answered/{shard}", 0)  # how many, by this process and those before it

    def next(self) -> tuple[int, str] | None:
        """Answer the next one: which worker, and the prefix; None: nobody knocks."""
        if not self._store.check([f"knocks/{self._shard}"]):
            return None
        knocks = self._store.get(f"knocks/{self._shard}").decode(errors="replace").split(";")[:-1]
        while self._heard < len(knocks):
            worker, _, name = knocks[self._heard].partition(":")
            self._heard = self._store.add(f"answered/{self._shard}", 1)
            if worker.isdecimal() and len(worker) <= MOST_DIGITS and name.isalnum():
                prefix = f"link/{self._shard}/{name}"
                self._store.set(f"{prefix}/answered", "")
                return int(worker), prefix
        return None  # whoever else wrote there is not one of ours


def answered(store: dist.Store, prefix: str) -> bool:
    """Whether the shard has heard the knock: then it is about to make the link too."""
    return store.check([f"{prefix}/answered"])
