"""The idx parser: what was written is read back, and everything else is refused by name."""

import gzip
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from offbeat.errors import DataError
from offbeat.experiments.tasks.idx import read_idx, read_labelled

SHAPES = st.lists(st.integers(0, 6), min_size=1, max_size=4)


def encode(values: NDArray[np.uint8]) -> bytes:
    return struct.pack(f">4B{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()


def counted(shape: list[int]) -> NDArray[np.uint8]:
    return (np.arange(np.prod(shape)) % 251).astype(np.uint8).reshape(shape)


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str, bytes], Path]:
    def write(name: str, content: bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return path

    return write


@given(shape=SHAPES, packed=st.booleans())
@settings(deadline=None)
def test_any_shape_is_read_back(shape: list[int], packed: bool) -> None:
    values = counted(shape)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("values.gz" if packed else "values")
        path.write_bytes(gzip.compress(encode(values)) if packed else encode(values))
        read = read_idx(path, len(shape))
    assert read.dtype == np.uint8
    np.testing.assert_array_equal(read, values)


@given(shape=SHAPES, packed=st.booleans(), data=st.data())
@settings(deadline=None)
def test_any_truncation_is_refused(shape: list[int], packed: bool, data: st.DataObject) -> None:
    whole = encode(counted(shape))
    whole = gzip.compress(whole) if packed else whole
    kept = data.draw(st.integers(0, len(whole) - 1))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("values.gz" if packed else "values")
        path.write_bytes(whole[:kept])
        with pytest.raises(DataError, match="values"):
            read_idx(path, len(shape))


@given(content=st.binary(max_size=64), packed=st.booleans())
@settings(deadline=None)
def test_arbitrary_bytes_give_only_data_errors(content: bytes, packed: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("values.gz" if packed else "values")
        path.write_bytes(content)
        try:
            assert encode(read_idx(path, 1)) == content
        except DataError as refusal:
            assert str(path) in str(refusal)


def test_wrong_magic_is_shown_beside_the_right_one(written: Callable[[str, bytes], Path]) -> None:
    labels = written("labels", encode(counted([20])))
    with pytest.raises(DataError, match="labels: starts with 00 00 08 01, expected 00 00 08 03"):
        read_idx(labels, 3)


def test_bytes_after_the_end_are_refused(written: Callable[[str, bytes], Path]) -> None:
    path = written("values.gz", encode(counted([2, 3])) + b"\0")
    with pytest.raises(DataError, match="holds 7 bytes of values, expected 6 for its shape 2 × 3"):
        read_idx(path, 2)


def test_a_gz_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "values.gz"
    path.write_bytes(encode(counted([3])))
    with pytest.raises(DataError, match=r"values\.gz: damaged or truncated .* expected a whole gzip file"):
        read_idx(path, 1)


def test_a_damaged_gz_is_refused(tmp_path: Path) -> None:
    packed = gzip.compress(encode(counted([40, 40])))
    header, no_deflate_block = packed[:10], b"\xff" * 100
    path = tmp_path / "values.gz"
    path.write_bytes(header + no_deflate_block)
    with pytest.raises(DataError, match=r"values\.gz: damaged or truncated .* invalid block type"):
        read_idx(path, 2)


def test_a_gz_with_another_checksum_is_refused(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(encode(counted([40, 40]))))
    packed[-8] ^= 0xFF
    path = tmp_path / "values.gz"
    path.write_bytes(packed)
    with pytest.raises(DataError, match=r"values\.gz: damaged or truncated .*CRC"):
        read_idx(path, 2)


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_idx(tmp_path, 1)


@pytest.mark.parametrize("shape", [[2, 28, 27], [2, 8, 28], [0, 28, 28]])
def test_images_of_another_size_are_refused(shape: list[int], written: Callable[[str, bytes], Path]) -> None:
    images, labels = written("images", encode(counted(shape))), written("labels", encode(counted([shape[0]])))
    with pytest.raises(DataError, match=r"images: has the shape .* expected 1 or more images of 28 × 28"):
        read_labelled(images, labels, height=28, width=28, classes=10)


def test_counts_that_disagree_are_refused(written: Callable[[str, bytes], Path]) -> None:
    images, labels = written("images", encode(counted([3, 2, 2]))), written("labels", encode(counted([4])))
    with pytest.raises(
        DataError, match=r"labels: holds 4 labels, expected 3, one for each image of .*images"
    ):
        read_labelled(images, labels, height=2, width=2, classes=10)


def test_labels_out_of_range_are_refused(written: Callable[[str, bytes], Path]) -> None:
    images, labels = written("images", encode(counted([11, 2, 2]))), written("labels", encode(counted([11])))
    with pytest.raises(DataError, match="labels: holds the label 10, expected 0 to 9"):
        read_labelled(images, labels, height=2, width=2, classes=10)
