"""The cifar10 task: 50,000 + 10,000 colour images of 32 × 32 pixels, in CIFAR-10's binary version.

A record is one byte for the label, then 1024 red, 1024 green and 1024 blue bytes. The version for Python is
not read: it is made of pickles, which can run any code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from offbeat.errors import DataError
from offbeat.experiments.tasks.augmentation import pad_crop_flip
from offbeat.experiments.tasks.base import BatchSize, Epochs, LearningRate
from offbeat.experiments.tasks.files.compression import content
from offbeat.experiments.tasks.files.locate import locate
from offbeat.experiments.tasks.files.manifest import DatasetManifest, File
from offbeat.experiments.tasks.images import Images, ImageTask
from offbeat.experiments.tasks.models.resnet import resnet18
from offbeat.experiments.tasks.models.vgg import vgg11, vgg19

SIDE, CHANNELS, CLASSES = 32, 3, 10
PIXELS = CHANNELS * SIDE * SIDE
RECORD = 1 + PIXELS
NBYTES = 10_000 * RECORD
# of the training pixels, by channel
MEAN = (0.4914, 0.4822, 0.4465)
DEVIATION = (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True, kw_only=True)
class Cifar10(ImageTask):
    """CIFAR-10 by Krizhevsky, Nair and Hinton. Rate, momentum, decay and batch are those of GSSP's code."""

    name: ClassVar[str] = "cifar10"
    summary: ClassVar[str] = "CIFAR-10: 60,000 colour images of 32 × 32 pixels, read from the data folder"
    models: ClassVar[tuple[str, ...]] = ("resnet18", "vgg11", "vgg19")
    builders: ClassVar[Mapping[str, Callable[[], nn.Module]]] = {
        "resnet18": resnet18,
        "vgg11": vgg11,
        "vgg19": vgg19,
    }
    weight_decay: ClassVar[float] = 5e-4
    manifest: ClassVar[DatasetManifest] = DatasetManifest(
        folder="cifar-10-batches-bin",
        files=(
            File(
                "data_batch_1.bin", NBYTES, "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"
            ),
            File(
                "data_batch_2.bin", NBYTES, "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"
            ),
            File(
                "data_batch_3.bin", NBYTES, "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"
            ),
            File(
                "data_batch_4.bin", NBYTES, "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"
            ),
            File(
                "data_batch_5.bin", NBYTES, "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"
            ),
            File(
                "test_batch.bin", NBYTES, "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"
            ),
        ),
        origin="Published by Krizhevsky, Nair and Hinton as the 'CIFAR-10 binary version'"
        " (www.cs.toronto.edu/~kriz/cifar.html). The version for Python (cifar-10-batches-py) is not read:"
        " it is made of pickles, which can run any code.",
        licence="none stated by the authors",
        addresses=("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
    )

    batch_size: BatchSize = 64
    epochs: Epochs = 30
    lr: LearningRate = 0.001

    def load(self, folder: Path | None = None) -> Images:
        paths = locate(self.name, self.manifest, folder)
        with ThreadPoolExecutor() as pool:  # decompression releases the GIL
            *parts, test = pool.map(read_records, paths.values())
        images, labels = zip(*parts, strict=True)
        return Images((torch.cat(images), torch.cat(labels)), test)

    def prepare(self, images: Tensor, training: bool) -> Tensor:
        """Normalise bytes to floats; in training, crop and flip at random first."""
        if training:
            images = pad_crop_flip(images)
        mean, deviation = levels(images.device)
        return images.to(torch.float32).sub_(mean).div_(deviation)


@lru_cache(maxsize=8)
def levels(device: torch.device) -> Tensor:
    """Return mean and deviation of each channel, in units of bytes."""
    return torch.tensor((MEAN, DEVIATION), device=device).mul_(255).reshape(2, 1, CHANNELS, 1, 1)


def read_records(path: Path) -> tuple[Tensor, Tensor]:
    """Read the images, bytes of (n, 3, 32, 32), and the labels of a binary file."""
    expected = f"records of {RECORD} bytes, a label and {CHANNELS} × {SIDE} × {SIDE} pixels"
    values = np.frombuffer(content(path, expected), np.uint8)
    if not len(values) or len(values) % RECORD:
        raise DataError(f"{path}: holds {len(values)} bytes, expected 1 or more {expected}")
    records = values.reshape(-1, RECORD)
    labels = records[:, 0].astype(np.int64)
    if labels.max() >= CLASSES:
        raise DataError(f"{path}: holds the label {labels.max()}, expected 0 to {CLASSES - 1}")
    images = records[:, 1:].reshape(-1, CHANNELS, SIDE, SIDE)
    return torch.from_numpy(images.copy()), torch.from_numpy(labels)
