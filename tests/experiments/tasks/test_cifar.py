"""CIFAR-10: records read back or refused, images moved and mirrored, and something learnt."""

from __future__ import annotations

import lzma
import math
import random
from pathlib import Path

import pytest
import torch

from offbeat.errors import DataError
from offbeat.experiments.tasks import task
from offbeat.experiments.tasks.cifar import DEVIATION, MEAN, RECORD, read_records
from offbeat.experiments.tasks.images import Images
from tests.support.small_data import write_small


def record(label: int, red: int, green: int, blue: int) -> bytes:
    return bytes([label]) + b"".join(bytes([value]) * 1024 for value in (red, green, blue))


@pytest.mark.parametrize("packed", [True, False])
def test_records_are_read_channel_by_channel(tmp_path: Path, packed: bool) -> None:
    content = record(3, 10, 20, 30) + record(9, 1, 2, 255)
    path = tmp_path / ("some.bin.xz" if packed else "some.bin")
    path.write_bytes(lzma.compress(content) if packed else content)
    images, labels = read_records(path)
    assert (images.shape, images.dtype) == ((2, 3, 32, 32), torch.uint8)
    assert labels.tolist() == [3, 9] and labels.dtype == torch.int64
    assert images[:, :, 5, 7].tolist() == [[10, 20, 30], [1, 2, 255]]
    rows = random.Random(1).randbytes(RECORD - 1)
    path.write_bytes(lzma.compress(b"\0" + rows) if packed else b"\0" + rows)
    assert read_records(path)[0][0, 2, 3, 4] == rows[2 * 1024 + 3 * 32 + 4]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "holds 0 bytes, expected 1 or more records of 3073 bytes"),
        (record(1, 1, 1, 1)[:-1], "holds 3072 bytes"),
        (record(1, 1, 1, 1) + b"\0", "holds 3074 bytes"),
        (record(10, 1, 1, 1), "holds the label 10, expected 0 to 9"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "some.bin"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"some.bin: {told}"):
        read_records(path)


def test_a_truncated_xz_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "some.bin.xz"
    path.write_bytes(lzma.compress(random.Random(0).randbytes(RECORD))[:-40])
    with pytest.raises(DataError, match=r"damaged or truncated .* expected a whole xz file"):
        read_records(path)


def test_the_version_for_python_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(b"\x80\x04")
    with pytest.raises(DataError, match=r"data_batch_1.bin.*cifar-10-batches-py.* is not read.*pickles"):
        task("cifar10").load(tmp_path)


def test_images_are_normalised_and_left_in_place_for_the_test() -> None:
    images = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
    expected = (images / 255 - torch.tensor(MEAN)[:, None, None]) / torch.tensor(DEVIATION)[:, None, None]
    torch.testing.assert_close(task("cifar10").prepare(images, training=False), expected)


# --- pad, crop, flip


def test_only_training_moves_images(tmp_path: Path) -> None:
    write_small(tmp_path)
    chosen = task("cifar10", model="vgg11")
    data, model = chosen.load(tmp_path), chosen.build()
    batch = data.batch(torch.arange(4))
    model.eval()
    assert chosen.evaluate(model, data) == chosen.evaluate(model, data)
    assert chosen.loss(model, batch).item() != chosen.loss(model, batch).item()


def test_optimizer_and_batch_are_those_of_the_paper() -> None:
    chosen = task("cifar10")
    defaults = chosen.optimizer(chosen.build()).defaults
    assert [defaults[what] for what in ("lr", "momentum", "weight_decay")] == [0.001, 0.9, 5e-4]
    assert chosen.batch_size == 64


# --- the real thing


def test_real_images_are_learnt(data_folder: Path, tmp_path: Path) -> None:
    """12 images of two classes: soon nearer than any guess that does not look can be, ln 2 nats."""
    chosen = task("cifar10", model="vgg11", lr=0.02)
    packed = data_folder / chosen.manifest.folder / "data_batch_1.bin.xz"  # type: ignore[union-attr]
    if not packed.exists():
        pytest.skip("CIFAR-10 lies there in another packing")
    with lzma.open(packed) as file:
        (tmp_path / "first.bin").write_bytes(file.read(200 * RECORD))
    images, labels = read_records(tmp_path / "first.bin")
    two = ((labels == 0) | (labels == 1)).nonzero().flatten()[:12]
    data = Images((images[two], labels[two]), (images[two], labels[two]))
    torch.manual_seed(0)
    model = chosen.build()
    optimizer = chosen.optimizer(model)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = chosen.loss(model, data.batch(torch.arange(len(two))))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 1.5
    assert sum(losses[-3:]) / 3 < math.log(2)
