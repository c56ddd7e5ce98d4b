"""Reading of files that may be compressed with gzip or xz, as their suffix says."""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from offbeat.errors import DataError

CHUNK = 1 << 20


def open_uncompressed(path: Path) -> IO[bytes]:
    """Open the uncompressed content as a stream."""
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path))
    return lzma.open(path) if path.suffix == ".xz" else path.open("rb")


def chunks(path: Path, expected: str) -> Iterator[bytes]:
    """Yield the uncompressed content in pieces; `expected` describes the file in error messages."""
    kind = {".gz": "a whole gzip file", ".xz": "a whole xz file"}.get(path.suffix, expected)
    try:
        with open_uncompressed(path) as file:
            while piece := file.read(CHUNK):
                yield piece
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path}: damaged or truncated ({error}), expected {kind}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}), expected {expected}") from error


def content(path: Path, expected: str) -> bytes:
    """Read the whole uncompressed content."""
    return b"".join(chunks(path, expected))
