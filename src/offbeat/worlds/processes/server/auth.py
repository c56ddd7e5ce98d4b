"""Authentication: workers and servers that share a token prove to each other that they know it.

Before a connection is used, each end sends an HMAC of random bytes that both have drawn. The token itself is
never sent.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

import torch
from torch import Tensor

from offbeat.worlds.processes.server.connection import Connection

TOKEN = "OFFBEAT_TOKEN"  # the environment variable
NONCE_BYTES = 32


def token_digest(token: bytes, text: str) -> str:
    """Sign a text with the token."""
    return hmac.new(token, text.encode(), hashlib.sha256).hexdigest()


def challenge(connection: Connection, token: bytes) -> bool:
    """Check, on the server's side, that the worker knows the token; if so, prove that the server does."""
    ours = secrets.token_bytes(NONCE_BYTES)
    connection.send(_tensor(ours))
    theirs, proof = _receive(connection, NONCE_BYTES), _receive(connection, hashlib.sha256().digest_size)
    known = hmac.compare_digest(proof, _proof(token, b"worker", ours, theirs))
    answer = _proof(token, b"server", theirs, ours)
    connection.send(_tensor(answer if known else bytes(len(answer))))
    return known


def prove(connection: Connection, token: bytes) -> bool:
    """Prove, on the worker's side, that it knows the token; return whether the server knows it."""
    ours, theirs = secrets.token_bytes(NONCE_BYTES), _receive(connection, NONCE_BYTES)
    connection.send(_tensor(ours + _proof(token, b"worker", theirs, ours)))
    answer = _receive(connection, hashlib.sha256().digest_size)
    return hmac.compare_digest(answer, _proof(token, b"server", ours, theirs))


def _proof(token: bytes, *parts: bytes) -> bytes:
    return hmac.new(token, b"".join(parts), hashlib.sha256).digest()


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _receive(connection: Connection, nbytes: int) -> bytes:
    received = torch.zeros(nbytes, dtype=torch.uint8)
    connection.receive(received)
    return bytes(received.tolist())
