"""Snapshot files: a shard's state as bytes on disk, with a checksum over all of them.

A file is a line that names the format, a line of JSON with the sizes of all tensors and the clocks, the
tensors' bytes, and the SHA-256 of everything before it. Nothing is read from a file whose checksum is wrong,
and nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from offbeat.errors import OffbeatError
from offbeat.server.messages import Tensors
from offbeat.server.sharding import ShardState

FORMAT = b"offbeat snapshot 1\n"
DIGEST_BYTES = hashlib.sha256().digest_size
PIECE_BYTES = 1 << 22
OWNER_ONLY = 0o600  # weights are nobody else's to read


def write_snapshot(path: Path, state: ShardState) -> None:
    """Write a state to a new file, down to the disk. Only its owner can read the file."""
    header = {
        "weights": _layout(state.weights),
        "optimizer": [_layout(part) for part in state.optimizer],
        "applied": list(state.applied.items()),
        "at": time.time(),
    }
    digest = hashlib.sha256()
    path.unlink(missing_ok=True)  # an unfinished one may have another mode
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY), "wb") as file:
        for piece in (FORMAT, json.dumps(header).encode() + b"\n", *_bytes_of(state)):
            digest.update(piece)
            file.write(piece)
        file.write(digest.digest())
        file.flush()
        os.fsync(file.fileno())


def read_snapshot(path: Path) -> ShardState:
    """Read a state; raise OffbeatError, with the reason, if the file is not as it was written."""
    try:
        with path.open("rb") as file:
            _check_digest(file)
            file.seek(len(FORMAT))
            header = json.loads(file.readline())
            weights = _read_tensors(file, header["weights"])
            optimizer = [_read_tensors(file, part) for part in header["optimizer"]]
            applied = {int(worker): int(clock) for worker, clock in header["applied"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as damaged:
        raise OffbeatError(str(damaged) or type(damaged).__name__) from damaged
    return ShardState(weights=weights, applied=applied, optimizer=optimizer)


def sync_folder(folder: Path) -> None:
    """Bring a folder's names to the disk: without this, a renamed file may be lost with the power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_digest(file: BinaryIO) -> None:
    if file.read(len(FORMAT)) != FORMAT:
        raise ValueError("it is not a snapshot, or one of another version")
    remaining = os.fstat(file.fileno()).st_size - len(FORMAT) - DIGEST_BYTES
    digest = hashlib.sha256(FORMAT)
    while remaining > 0 and (piece := file.read(min(PIECE_BYTES, remaining))):
        digest.update(piece)
        remaining -= len(piece)
    if remaining or file.read() != digest.digest():
        raise ValueError("its checksum is wrong")


def _layout(tensors: Tensors) -> list[tuple[str, int]]:
    return [(str(tensor.dtype).removeprefix("torch."), tensor.numel()) for tensor in tensors]


def _bytes_of(state: ShardState) -> Iterator[Any]:
    for tensors in (state.weights, *state.optimizer):
        for tensor in tensors:
            yield _view(tensor)


def _read_tensors(file: BinaryIO, layout: list[tuple[str, int]]) -> Tensors:
    tensors = [torch.empty(numel, dtype=getattr(torch, dtype)) for dtype, numel in layout]
    for tensor in tensors:
        if file.readinto(_view(tensor)) != tensor.nbytes:  # type: ignore[attr-defined]
            raise ValueError("it is too short")
    return tensors


def _view(tensor: Tensor) -> memoryview:
    return tensor.detach().view(torch.uint8).numpy().data
