"""Classifying images which fit in memory: what the digits and both MNIST tasks share."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from offbeat.tasks.task import Batch, Data, Task

TEST_BATCH = 1000


class Images(Data):
    """Labelled images as whole tensors: float inputs, int64 targets, for training and for the test."""

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
    """Cross-entropy, SGD with momentum, and accuracy. `builders` makes the model of each name."""

    builders: ClassVar[Mapping[str, Callable[[], nn.Module]]]

    def build(self) -> nn.Module:
        return self.builders[self.model]()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        return functional.cross_entropy(model(inputs), targets)

    def evaluate(self, model: nn.Module, data: Data) -> float:
        hits: list[Tensor] = []
        with evaluating(model), torch.no_grad():
            for inputs, targets in data.test_batches():
                hits.append(model(inputs).argmax(dim=1) == targets)
        right = torch.cat(hits)
        return int(right.sum()) / len(right)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and afterwards for each submodule the mode it had: some may be frozen."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
