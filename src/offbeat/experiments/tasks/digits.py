"""The digits task: 1,797 small images that come with the package (see digits.md), so it runs anywhere."""

import gzip
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from offbeat.experiments.tasks.base import BatchSize, Epochs, LearningRate
from offbeat.experiments.tasks.images import Images, ImageTask
from offbeat.experiments.tasks.models.small_images import digits_cnn, digits_mlp

TEST_IMAGES_PER_DIGIT = 36


@dataclass(frozen=True, kw_only=True)
class Digits(ImageTask):
    """Handwritten digits of 8 × 8 pixels: trained in seconds, without a download."""

    name: ClassVar[str] = "digits"
    summary: ClassVar[str] = "1,797 handwritten digits of 8 × 8 pixels, shipped with Offbeat"
    models: ClassVar[tuple[str, ...]] = ("cnn", "mlp")
    builders: ClassVar[Mapping[str, Callable[[], nn.Module]]] = {
        "cnn": digits_cnn,
        "mlp": digits_mlp,
    }

    batch_size: BatchSize = 16
    epochs: Epochs = 20
    lr: LearningRate = 0.03

    def load(self, folder: Path | None = None) -> Images:
        shipped = resources.files("offbeat.experiments.tasks").joinpath("digits.csv.gz")
        with shipped.open("rb") as compressed, gzip.open(compressed, "rt", encoding="ascii") as lines:
            table = torch.from_numpy(np.loadtxt(lines, delimiter=",", dtype=np.int64))
        inputs = table[:, :-1].to(torch.float32).div_(8).sub_(1).reshape(-1, 1, 8, 8)
        targets = table[:, -1].contiguous()
        test = test_rows(targets)
        return Images((inputs[~test], targets[~test]), (inputs[test], targets[test]))


def test_rows(labels: Tensor) -> Tensor:
    """Return a mask of the test images: equally many of each digit, evenly spaced in the file's order."""
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for digit in range(10):
        rows = (labels == digit).nonzero().flatten()
        chosen[rows[torch.arange(TEST_IMAGES_PER_DIGIT) * len(rows) // TEST_IMAGES_PER_DIGIT]] = True
    return chosen
