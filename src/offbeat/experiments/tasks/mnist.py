"""The mnist and fashion-mnist tasks: 60,000 + 10,000 grey images of 28 × 28 pixels, read from idx files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from offbeat.experiments.tasks.base import BatchSize, Epochs, LearningRate
from offbeat.experiments.tasks.files.locate import locate
from offbeat.experiments.tasks.files.manifest import DatasetManifest, File
from offbeat.experiments.tasks.idx import read_labelled
from offbeat.experiments.tasks.images import Images, ImageTask
from offbeat.experiments.tasks.models.small_images import cnn, lenet5, mlp

IMAGES, LABELS, TEST_IMAGES, TEST_LABELS = FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
NBYTES = (47_040_016, 60_008, 7_840_016, 10_008)


def files(*checksums: str) -> tuple[File, ...]:
    """List the four files with their checksums."""
    return tuple(map(File, FILES, NBYTES, checksums))


@dataclass(frozen=True, kw_only=True)
class IdxTask(ImageTask):
    """Images of 28 × 28 pixels in ten classes, normalised by mean and deviation of the training pixels."""

    manifest: ClassVar[DatasetManifest]
    mean: ClassVar[float]
    deviation: ClassVar[float]
    builders: ClassVar[Mapping[str, Callable[[], nn.Module]]] = {"lenet5": lenet5, "mlp": mlp, "cnn": cnn}

    batch_size: BatchSize = 32
    epochs: Epochs = 10
    lr: LearningRate = 0.02

    def load(self, folder: Path | None = None) -> Images:
        paths = locate(self.name, self.manifest, folder)
        train = self._read(paths[IMAGES], paths[LABELS])
        return Images(train, self._read(paths[TEST_IMAGES], paths[TEST_LABELS]))

    def _read(self, images: Path, labels: Path) -> tuple[Tensor, Tensor]:
        pixels, numbers = read_labelled(images, labels, height=28, width=28, classes=10)
        inputs = torch.from_numpy(pixels.astype(np.float32)).unsqueeze_(1)
        inputs.sub_(255 * self.mean).div_(255 * self.deviation)
        return inputs, torch.from_numpy(numbers.astype(np.int64))


@dataclass(frozen=True, kw_only=True)
class Mnist(IdxTask):
    """MNIST, the handwritten digits of LeCun, Cortes and Burges."""

    name: ClassVar[str] = "mnist"
    summary: ClassVar[str] = "MNIST: 70,000 handwritten digits of 28 × 28 pixels, read from the data folder"
    models: ClassVar[tuple[str, ...]] = ("lenet5", "mlp", "cnn")
    manifest: ClassVar[DatasetManifest] = DatasetManifest(
        folder="mnist",
        files=files(
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
        origin="Published by LeCun, Cortes and Burges as 'The MNIST database of handwritten digits'"
        " (yann.lecun.com/exdb/mnist); the second address is the copy that PyTorch's own loader uses.",
        licence="CC BY-SA 3.0",
        addresses=(
            "http://yann.lecun.com/exdb/mnist/{name}.gz",
            "https://ossci-datasets.s3.amazonaws.com/mnist/{name}.gz",
        ),
    )
    mean: ClassVar[float] = 0.1307
    deviation: ClassVar[float] = 0.3081


@dataclass(frozen=True, kw_only=True)
class FashionMnist(IdxTask):
    """Fashion-MNIST, the articles of clothing by Xiao, Rasul and Vollgraf."""

    name: ClassVar[str] = "fashion-mnist"
    summary: ClassVar[str] = (
        "Fashion-MNIST: 70,000 articles of clothing, 28 × 28 pixels, read from the data folder"
    )
    models: ClassVar[tuple[str, ...]] = ("mlp", "lenet5", "cnn")
    manifest: ClassVar[DatasetManifest] = DatasetManifest(
        folder="fashion-mnist",
        files=files(
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
        origin="Published on GitHub as zalandoresearch/fashion-mnist (data/fashion),"
        " and in Debian as the package dataset-fashion-mnist.",
        licence="MIT",
        addresses=(
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/{name}.gz",
        ),
    )
    mean: ClassVar[float] = 0.2860
    deviation: ClassVar[float] = 0.3530
