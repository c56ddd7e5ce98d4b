"""The spirals task: which of two interleaved spirals is a point on? All points are drawn from a seed.

(x, y) = r · (cos φ, sin φ) + noise · ξ        r uniform in [0.2, 2],   φ = r π + class · π,   ξ ~ N(0, I)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from offbeat.core.fields import Number
from offbeat.experiments.tasks.base import Batch, BatchSize, Data, Epochs, LearningRate, Task, evaluating

TRAIN, TEST = 1024, 512
SEED = 2  # of the points; the seed of a run draws weights and batches


class Points(Data):
    """Points and their classes, for training and for the test."""

    def __init__(self, train: Batch, test: Batch) -> None:
        self.train = train
        self.test = test

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def labels(self) -> Tensor:
        return self.train[1]

    def batch(self, indices: Tensor) -> Batch:
        points, classes = self.train
        return points[indices], classes[indices]

    def test_batches(self) -> Iterator[Batch]:
        yield self.test

    def to(self, device: torch.device | str) -> Self:
        train, test = (tuple(tensor.to(device) for tensor in split) for split in (self.train, self.test))
        return type(self)(train, test)


@dataclass(frozen=True, kw_only=True)
class Spirals(Task):
    """Two spirals that no line separates: trained in a second, without a download."""

    name: ClassVar[str] = "spirals"
    summary: ClassVar[str] = "two interleaved spirals of points, drawn from a seed"
    models: ClassVar[tuple[str, ...]] = ("mlp",)

    batch_size: BatchSize = 32
    epochs: Epochs = 20
    lr: LearningRate = 0.1
    noise: Annotated[float, Number("distance of the points from their spiral", at_least=0)] = 0.05

    def load(self, folder: Path | None = None) -> Points:
        generator = torch.Generator().manual_seed(SEED)
        return Points(self._draw(TRAIN, generator), self._draw(TEST, generator))

    def _draw(self, count: int, generator: torch.Generator) -> Batch:
        classes = torch.arange(count) % 2
        radius = 0.2 + 1.8 * torch.rand(count, generator=generator)
        angle = (radius + classes) * math.pi
        points = radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
        return points + self.noise * torch.randn(count, 2, generator=generator), classes

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        points, classes = batch
        return functional.cross_entropy(model(points), classes)

    def evaluate(self, model: nn.Module, data: Data) -> float:
        with evaluating(model), torch.no_grad():
            hits = [model(points).argmax(dim=1) == classes for points, classes in data.test_batches()]
        return torch.cat(hits).float().mean().item()
