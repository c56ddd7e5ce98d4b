"""Authentication: workers and servers that share a token prove to each other that they know it.

Before a connection is used, each end sends an HMAC of random bytes that both have drawn and of the channel
between them. The token itself is never sent. The channel is part of the proof, so a proof that a third
process forwards from another connection is wrong: over TLS the channel is the certificate that the worker
sees, without TLS the TCP port at which the shard listens.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

import torch
from torch import Tensor

from offbeat.errors import OffbeatError
from offbeat.worlds.processes.server.connection import Connection

TOKEN = "OFFBEAT_TOKEN"  # the environment variable
NONCE_BYTES = 32
DIGEST_BYTES = hashlib.sha256().digest_size


# --- texts


def run_token(token: bytes, run: bytes) -> bytes:
    """Return the token of one run. A proof or a signature of another run is worth nothing in this one."""
    return hmac.new(token, b"run\0" + run, hashlib.sha256).hexdigest().encode()


def sign(token: bytes, key: str, value: str) -> str:
    """Return a value that is published under this key, after its signature."""
    return f"{_signature(token, key, value.encode())} {value}"


def verify(token: bytes, key: str, signed: bytes) -> str:
    """Return a published value without its signature; raise an error if the signature is wrong."""
    signature, _, value = signed.partition(b" ")
    if not hmac.compare_digest(signature, _signature(token, key, value).encode()):
        raise OffbeatError(
            f"{key!r} in the store is not signed with this token: check {TOKEN}; if it is right, "
            "somebody else has written to the store"
        )
    return value.decode()


def _signature(token: bytes, key: str, value: bytes) -> str:
    return hmac.new(token, b"value\0" + key.encode() + b"\0" + value, hashlib.sha256).hexdigest()


# --- connections


def challenge(connection: Connection, token: bytes) -> bool:
    """Check, on the server's side, that the worker knows the token; if so, prove that the server does."""
    channel = connection.channel(server_side=True)
    ours = secrets.token_bytes(NONCE_BYTES)
    connection.send(_tensor(ours))
    theirs, proof = _receive(connection, NONCE_BYTES), _receive(connection, DIGEST_BYTES)
    known = hmac.compare_digest(proof, _proof(token, b"worker", ours, theirs, channel))
    answer = _proof(token, b"server", theirs, ours, channel)
    connection.send(_tensor(answer if known else bytes(len(answer))))
    return known


def prove(connection: Connection, token: bytes) -> bool:
    """Prove, on the worker's side, that it knows the token; return whether the server knows it."""
    channel = connection.channel(server_side=False)
    ours, theirs = secrets.token_bytes(NONCE_BYTES), _receive(connection, NONCE_BYTES)
    connection.send(_tensor(ours + _proof(token, b"worker", theirs, ours, channel)))
    answer = _receive(connection, DIGEST_BYTES)
    return hmac.compare_digest(answer, _proof(token, b"server", ours, theirs, channel))


def _proof(token: bytes, *parts: bytes) -> bytes:
    return hmac.new(token, b"proof\0" + b"".join(parts), hashlib.sha256).digest()


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _receive(connection: Connection, nbytes: int) -> bytes:
    received = torch.zeros(nbytes, dtype=torch.uint8)
    connection.receive(received)
    return bytes(received.tolist())
