"""Reading idx files, the format MNIST is published in, and refusing all that is not exactly that."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import DataError

UNSIGNED_BYTE = 0x08


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """The array of unsigned bytes in an idx file, packed if its name ends in .gz."""
    content = _content(path)
    header = 4 + 4 * dimensions
    magic = bytes((0, 0, UNSIGNED_BYTE, dimensions))
    if len(content) < header:
        raise DataError(f"{path}: holds {len(content)} bytes, expected an idx header of {header}")
    if content[:4] != magic:
        raise DataError(
            f"{path}: starts with {content[:4].hex(' ')}, expected {magic.hex(' ')}"
            f" (idx, unsigned bytes, {dimensions} dimensions)"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    if len(content) - header != math.prod(shape):
        raise DataError(
            f"{path}: holds {len(content) - header} bytes of values, expected {math.prod(shape)}"
            f" for its shape {' × '.join(map(str, shape))}"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def read_labelled(
    images: Path, labels: Path, height: int, width: int, classes: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Images with one label each, of the size and the number of classes that are asked for."""
    pixels = read_idx(images, 3)
    if pixels.shape[1:] != (height, width) or not len(pixels):
        found = " × ".join(map(str, pixels.shape))
        raise DataError(f"{images}: has the shape {found}, expected 1 or more images of {height} × {width}")
    numbers = read_idx(labels, 1)
    if len(numbers) != len(pixels):
        raise DataError(
            f"{labels}: holds {len(numbers)} labels, expected {len(pixels)}, one for each image of {images}"
        )
    if numbers.max() >= classes:
        raise DataError(f"{labels}: holds the label {numbers.max()}, expected 0 to {classes - 1}")
    return pixels, numbers


def _content(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (EOFError, gzip.BadGzipFile, zlib.error) as reason:
        raise DataError(f"{path}: damaged or truncated ({reason}), expected a whole gzip file") from reason
    except OSError as reason:
        raise DataError(f"{path}: cannot be read ({reason.strerror}), expected an idx file") from reason
