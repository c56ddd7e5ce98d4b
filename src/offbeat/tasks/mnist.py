"""The mnist and fashion-mnist tasks: 60,000 + 10,000 grey images of 28 × 28 pixels, read from idx files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from offbeat.tasks.idx import read_labelled
from offbeat.tasks.images import Images, ImageTask
from offbeat.tasks.location import locate
from offbeat.tasks.models import cnn, lenet5, mlp

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


@dataclass(frozen=True, kw_only=True)
class IdxTask(ImageTask):
    """Ten classes of 28 × 28 pixels, normalised by the mean and deviation of the training pixels."""

    published: ClassVar[str]
    mean: ClassVar[float]
    deviation: ClassVar[float]
    builders: ClassVar[Mapping[str, Callable[[], nn.Module]]] = {"lenet5": lenet5, "mlp": mlp, "cnn": cnn}

    batch_size: int = 32
    epochs: int = 10
    lr: float = 0.02

    def load(self, folder: Path | None = None) -> Images:
        files = locate(self.name, FILES, folder, self.published)
        return Images(self._read(files[0], files[1]), self._read(files[2], files[3]))

    def _read(self, images: Path, labels: Path) -> tuple[Tensor, Tensor]:
        pixels, numbers = read_labelled(images, labels, height=28, width=28, classes=10)
        inputs = torch.from_numpy(pixels.astype(np.float32)).unsqueeze_(1)
        inputs.sub_(255 * self.mean).div_(255 * self.deviation)
        return inputs, torch.from_numpy(numbers.astype(np.int64))


@dataclass(frozen=True, kw_only=True)
class Mnist(IdxTask):
    """MNIST, the handwritten digits of LeCun, Cortes and Burges."""

    name: ClassVar[str] = "mnist"
    summary: ClassVar[str] = "MNIST: 70,000 handwritten digits of 28 × 28 pixels, read from --data"
    models: ClassVar[tuple[str, ...]] = ("lenet5", "mlp", "cnn")
    published: ClassVar[str] = (
        "Published by LeCun, Cortes and Burges as 'The MNIST database of handwritten digits'"
        " (yann.lecun.com/exdb/mnist)."
    )
    mean: ClassVar[float] = 0.1307
    deviation: ClassVar[float] = 0.3081


@dataclass(frozen=True, kw_only=True)
class FashionMnist(IdxTask):
    """Fashion-MNIST, the articles of clothing by Xiao, Rasul and Vollgraf."""

    name: ClassVar[str] = "fashion-mnist"
    summary: ClassVar[str] = "Fashion-MNIST: 70,000 articles of clothing, 28 × 28 pixels, read from --data"
    models: ClassVar[tuple[str, ...]] = ("mlp", "lenet5", "cnn")
    published: ClassVar[str] = (
        "Published on GitHub as zalandoresearch/fashion-mnist (data/fashion),"
        " and in Debian as the package dataset-fashion-mnist."
    )
    mean: ClassVar[float] = 0.2860
    deviation: ClassVar[float] = 0.3530
