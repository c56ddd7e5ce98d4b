"""Reading files that may be packed: as they are, or under gzip or xz, as the name says."""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from offbeat.errors import DataError

CHUNK = 1 << 20


def open_unpacked(path: Path) -> IO[bytes]:
    """The content as a stream."""
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path))
    return lzma.open(path) if path.suffix == ".xz" else path.open("rb")


def chunks(path: Path, expected: str) -> Iterator[bytes]:
    """The content, piece by piece; `expected` says in an error what should have been there."""
    packing = {".gz": "a whole gzip file", ".xz": "a whole xz file"}.get(path.suffix, expected)
    try:
        with open_unpacked(path) as file:
            while piece := file.read(CHUNK):
                yield piece
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as reason:
        raise DataError(f"{path}: damaged or truncated ({reason}), expected {packing}") from reason
    except OSError as reason:
        raise DataError(f"{path}: cannot be read ({reason.strerror}), expected {expected}") from reason


def content(path: Path, expected: str) -> bytes:
    return b"".join(chunks(path, expected))
