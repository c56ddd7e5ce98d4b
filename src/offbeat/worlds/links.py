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
import json
import secrets
from collections.abc import Iterable
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SERVER, WORKER = 0, 1
NOW = -1  # as the clock of a pull: whatever the weights are
HEADER = 4
CHALLENGE_BYTES = 32


class Kind(IntEnum):
    """What a header announces."""

    OPEN = 1  # weights to start with follow
    PUSH = 2  # an update follows
    PULL = 3
    LEAVE = 4
    WEIGHTS = 5  # weights follow
    REFUSED = 6


class Link:
    """One end of a link."""

    def __init__(self, store: dist.Store, prefix: str, side: int, timeout_s: float) -> None:
        self._other = 1 - side
        self._group: Any = dist.ProcessGroupGloo(
            dist.PrefixStore(prefix, store), side, 2, timedelta(seconds=timeout_s)
        )

    def send(self, *tensors: Tensor) -> list[Any]:
        """Start to send; every returned work is to be waited for."""
        return [self._group.send([tensor], self._other, 0) for tensor in tensors if tensor.numel()]

    def receive(self, *tensors: Tensor) -> list[Any]:
        return [self._group.recv([tensor], self._other, 0) for tensor in tensors if tensor.numel()]

    def close(self) -> None:
        self._group.abort()


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
    """Ask a shard for a link; the prefix under which it will be made."""
    number = store.add(f"knocks/{shard}", 1)
    prefix = f"link/{shard}/{number}"
    store.set(f"knock/{shard}/{number}", json.dumps({"worker": worker, "prefix": prefix}))
    return prefix
