"""The mnist and fashion-mnist tasks: where their files are found, and what is read from them."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from offbeat.errors import DataError
from offbeat.experiments.tasks import task
from offbeat.experiments.tasks.images import Images
from offbeat.experiments.tasks.mnist import FILES

BOTH_MNIST = ("mnist", "fashion-mnist")


@pytest.fixture
def write_idx(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Writes a tiny data set of 4 + 2 images: image i has the label i, and all its pixels are 10 × i."""
    monkeypatch.delenv("OFFBEAT_DATA", raising=False)

    def write(folder: Path, packed: bool = True, only: tuple[str, ...] = FILES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for file in only:
            count = 4 if file.startswith("train") else 2
            if "images" in file:
                content = struct.pack(">4B3I", 0, 0, 8, 3, count, 28, 28)
                content += b"".join(bytes([10 * i]) * 784 for i in range(count))
            else:
                content = struct.pack(">4BI", 0, 0, 8, 1, count) + bytes(range(count))
            (folder / (file + ".gz" * packed)).write_bytes(gzip.compress(content) if packed else content)

    return write


@pytest.mark.parametrize("name", BOTH_MNIST)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("by_variable", [True, False])
def test_files_are_found_in_every_place_that_is_promised(
    name: str,
    packed: bool,
    inside: bool,
    by_variable: bool,
    tmp_path: Path,
    write_idx: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_idx(tmp_path / name if inside else tmp_path, packed)
    if by_variable:
        monkeypatch.setenv("OFFBEAT_DATA", str(tmp_path))
    data = task(name).load(None if by_variable else tmp_path)
    assert isinstance(data, Images)
    assert data.train[0].shape == (4, 1, 28, 28) and data.test[0].shape == (2, 1, 28, 28)
    assert data.train[0].is_contiguous() and data.train[0].dtype == torch.float32
    assert data.labels.dtype == torch.int64 and data.labels.tolist() == [0, 1, 2, 3]
    mean, deviation = (0.1307, 0.3081) if name == "mnist" else (0.2860, 0.3530)
    expected = (torch.tensor([0.0, 10, 20, 30]) / 255 - mean) / deviation
    torch.testing.assert_close(data.train[0][:, 0, 9, 9], expected)


def test_the_folder_given_goes_before_the_variable(
    tmp_path: Path, write_idx: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_idx(tmp_path)
    monkeypatch.setenv("OFFBEAT_DATA", str(tmp_path / "nowhere"))
    assert len(task("mnist").load(tmp_path)) == 4


@pytest.mark.parametrize(
    ("name", "publisher"),
    [("mnist", "LeCun"), ("fashion-mnist", "zalandoresearch/fashion-mnist"), ("fashion-mnist", "Debian")],
)
@pytest.mark.parametrize(
    ("folder", "problem"),
    [
        (None, "no data folder is given"),
        ("nowhere", "there is no folder"),
        ("", "none of its files is in"),
    ],
)
def test_missing_data_says_what_to_fetch_and_what_to_type(
    name: str,
    publisher: str,
    folder: str | None,
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OFFBEAT_DATA", "")
    with pytest.raises(DataError) as refusal:
        task(name).load(None if folder is None else tmp_path / folder)
    for part in (problem, publisher, f"DIR/{name}", *FILES, "DIR as the data folder", "OFFBEAT_DATA=DIR"):
        assert part in str(refusal.value)


def test_files_that_lack_are_named(tmp_path: Path, write_idx: Callable[..., None]) -> None:
    write_idx(tmp_path / "mnist", only=FILES[:2])
    with pytest.raises(DataError, match=f"{tmp_path / 'mnist'} lacks {FILES[2]}, {FILES[3]}"):
        task("mnist").load(tmp_path)


@pytest.mark.parametrize("name", BOTH_MNIST)
def test_the_real_files_hold_what_is_published(name: str, data_folder: Path) -> None:
    data = task(name).load(data_folder)
    assert isinstance(data, Images)
    assert data.train[0].shape == (60_000, 1, 28, 28) and data.test[0].shape == (10_000, 1, 28, 28)
    assert data.labels.unique().tolist() == data.test[1].unique().tolist() == list(range(10))
    assert abs(float(data.train[0].mean())) < 1e-3 and abs(float(data.train[0].std()) - 1) < 1e-3
