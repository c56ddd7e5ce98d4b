"""Classification of images that fit in memory: the base of the digits, MNIST and CIFAR tasks."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from offbeat.experiments.tasks.base import Batch, Data, Task, evaluating

TEST_BATCH = 1000


class Images(Data):
    """Labelled images as tensors: inputs and int64 targets, for training and for the test."""

    def __init__(self, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> None:
        self.train = train
        self.test = test

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def labels(self) -> Tensor:
        return self.train[1]

    def batch(self, indices: Tensor) -> Batch:
        inputs, targets = self.train
        return inputs[indices], targets[indices]

    def test_batches(self) -> Iterator[Batch]:
        inputs, targets = self.test
        for start in range(0, len(targets), TEST_BATCH):
            part = slice(start, start + TEST_BATCH)
            yield inputs[part], targets[part]

    def to(self, device: torch.device | str) -> Self:
        train, test = ((inputs.to(device), targets.to(device)) for inputs, targets in (self.train, self.test))
        return type(self)(train, test)


@dataclass(frozen=True, kw_only=True)
class ImageTask(Task):
    """Classification with cross-entropy, SGD with momentum, and accuracy. `builders` maps names to models."""

    builders: ClassVar[Mapping[str, Callable[[], nn.Module]]]
    weight_decay: ClassVar[float] = 0.0

    def build(self) -> nn.Module:
        return self.builders[self.model]()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9, weight_decay=self.weight_decay)

    def prepare(self, images: Tensor, training: bool) -> Tensor:
        """Convert images of the data set to inputs of the model."""
        return images

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, targets = batch
        return functional.cross_entropy(model(self.prepare(images, training=True)), targets)

    def evaluate(self, model: nn.Module, data: Data) -> float:
        hits: list[Tensor] = []
        with evaluating(model), torch.no_grad():
            for images, targets in data.test_batches():
                hits.append(model(self.prepare(images, training=False)).argmax(dim=1) == targets)
        right = torch.cat(hits)
        return int(right.sum()) / len(right)
