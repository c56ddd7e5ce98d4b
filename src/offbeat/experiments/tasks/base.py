"""What every task offers: settings, data, a model, its loss and its yardstick."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from offbeat.core.settings import nearest
from offbeat.errors import SettingError
from offbeat.experiments.tasks.files.manifest import DatasetManifest

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

    @property
    def lengths(self) -> Tensor | None:
        """How long each training sample is, on the CPU, where they differ: batches hold similar ones."""
        return None


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """What is trained. The fields are its settings; `batch_size` is per worker and step.

    Whatever a step draws at random (dropout, crops of images) it draws in `loss`, from torch's global
    generators: the loop seeds them by run, worker and step, so both worlds draw the same.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True
    models: ClassVar[tuple[str, ...]]
    manifest: ClassVar[DatasetManifest | None] = None  # None: there is nothing to fetch
    max_norm: ClassVar[float | None] = None  # gradients are clipped to this norm before the optimizer steps

    model: str = ""  # empty: the first of `models`
    batch_size: int = 32
    epochs: int = 10
    lr: float = 0.05

    def __post_init__(self) -> None:
        if not self.model:
            object.__setattr__(self, "model", self.models[0])
        if self.model not in self.models:
            raise SettingError(f"{self.name} has no model {self.model!r}{nearest(self.model, self.models)}")
        self._whole("batch_size", "epochs")
        if not isinstance(self.lr, int | float) or not 0 < self.lr < math.inf:
            raise SettingError(f"lr must be a finite number above 0, not {self.lr!r}")

    def _whole(self, *settings: str, least: int = 1) -> None:
        for setting in settings:
            value = getattr(self, setting)
            if not isinstance(value, int) or value < least:
                raise SettingError(f"{setting} must be a whole number of at least {least}, not {value!r}")

    @abstractmethod
    def load(self, folder: Path | None = None) -> Data:
        """Read the data; `folder` matters only to data that is not shipped with the package."""

    @abstractmethod
    def build(self) -> nn.Module:
        """A new model, its weights drawn from torch's global generator: the caller seeds."""

    @abstractmethod
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer this task is trained with."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss over the batch."""

    def gradient(self, model: nn.Module, batch: Batch) -> Tensor:
        """Add the loss's gradient to `grad` of each parameter; the loss, detached."""
        with torch.enable_grad():
            loss = self.loss(model, batch)
            loss.backward()
        return loss.detach()

    def clip(self, model: nn.Module) -> None:
        """Between backward and the optimizer's step."""
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)

    @abstractmethod
    def evaluate(self, model: nn.Module, data: Data) -> float:
        """The metric on the test split; leaves the model in the mode it was in."""

    def extra_metrics(self, model: nn.Module, data: Data) -> dict[str, float]:
        """Further yardsticks on the test split, by name; targets are for the metric only."""
        return {}


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
