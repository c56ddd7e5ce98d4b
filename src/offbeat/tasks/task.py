"""What every task offers: settings, data, a model, its loss and its yardstick."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from offbeat.errors import SettingError
from offbeat.settings import nearest

Batch = tuple[Tensor, ...]


class Data(ABC):
    """The training samples a task draws batches from, plus what it needs to evaluate."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of training samples."""

    @abstractmethod
    def batch(self, indices: Tensor) -> Batch:
        """The training samples at these indices, on the device of the data."""

    @abstractmethod
    def test_batches(self) -> Iterator[Batch]:
        """The whole test split, in order."""

    @abstractmethod
    def to(self, device: torch.device | str) -> Self:
        """The same data on another device."""

    @property
    def labels(self) -> Tensor | None:
        """The class of each training sample (int64), where the data has classes."""
        return None


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """What is trained. The fields are its settings; `batch_size` is per worker and step."""

    name: ClassVar[str]
    summary: ClassVar[str]
    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True
    models: ClassVar[tuple[str, ...]]

    model: str = ""  # empty: the first of `models`
    batch_size: int = 32
    epochs: int = 10
    lr: float = 0.05

    def __post_init__(self) -> None:
        if not self.model:
            object.__setattr__(self, "model", self.models[0])
        if self.model not in self.models:
            raise SettingError(f"{self.name} has no model {self.model!r}{nearest(self.model, self.models)}")
        for setting in ("batch_size", "epochs"):
            value = getattr(self, setting)
            if not isinstance(value, int) or value < 1:
                raise SettingError(f"{setting} must be a whole number of at least 1, not {value!r}")
        if not isinstance(self.lr, int | float) or not 0 < self.lr < math.inf:
            raise SettingError(f"lr must be a finite number above 0, not {self.lr!r}")

    @abstractmethod
    def load(self, folder: Path | None = None) -> Data:
        """Read the data; `folder` matters only to data that is not shipped with the package."""

    @abstractmethod
    def build(self) -> nn.Module:
        """A new model, its weights drawn from torch's global generator: the caller seeds."""

    @abstractmethod
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer this task is tuned for."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss over the batch."""

    def gradient(self, model: nn.Module, batch: Batch) -> Tensor:
        """Add the loss's gradient to `grad` of each parameter; the loss, detached."""
        with torch.enable_grad():
            loss = self.loss(model, batch)
            loss.backward()
        return loss.detach()

    @abstractmethod
    def evaluate(self, model: nn.Module, data: Data) -> float:
        """The metric on the test split; leaves the model in the mode it was in."""
