"""Reading of idx files, the format of MNIST, with strict checks of header, size and labels."""

import math
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import DataError
from offbeat.experiments.tasks.files.compression import content

UNSIGNED_BYTE = 0x08


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read the array of unsigned bytes in an idx file, compressed if its name ends in .gz or .xz."""
    data = content(path, "an idx file")
    header = 4 + 4 * dimensions
    magic = bytes((0, 0, UNSIGNED_BYTE, dimensions))
    if len(data) < header:
        raise DataError(f"{path}: holds {len(data)} bytes, expected an idx header of {header}")
    if data[:4] != magic:
        raise DataError(
            f"{path}: starts with {data[:4].hex(' ')}, expected {magic.hex(' ')}"
            f" (idx, unsigned bytes, {dimensions} dimensions)"
        )
    shape = struct.unpack(f">{dimensions}I", data[4:header])
    if len(data) - header != math.prod(shape):
        raise DataError(
            f"{path}: holds {len(data) - header} bytes of values, expected {math.prod(shape)}"
            f" for its shape {' × '.join(map(str, shape))}"
        )
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def read_labelled(
    images: Path, labels: Path, height: int, width: int, classes: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Read images with one label each, of the given size and number of classes."""
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
