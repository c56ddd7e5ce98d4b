"""The interface of a task: settings, data, a model, its loss and its metric."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from offbeat.core.fields import Number, Text, Whole
from offbeat.core.overrides import promises
from offbeat.core.settings import Settings, nearest
from offbeat.errors import SettingError
from offbeat.experiments.tasks.files.manifest import DatasetManifest

Batch = tuple[Tensor, ...]

Model = Annotated[str, Text("one of the task's models; default: the first", noun="the name of a model")]
BatchSize = Annotated[int, Whole("samples per worker and step", of="samples", at_least=1)]
Epochs = Annotated[int, Whole("passes over the data", of="epochs", at_least=1)]
LearningRate = Annotated[float, Number("learning rate of the optimizer", noun="a finite number", above=0)]


class Data(ABC):
    """The training samples of a task, and its test split."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of training samples."""

    @abstractmethod
    def batch(self, indices: Tensor) -> Batch:
        """Return the training samples at these indices, on the device of the data."""

    @abstractmethod
    def test_batches(self) -> Iterator[Batch]:
        """Yield the whole test split, in order."""

    @abstractmethod
    def to(self, device: torch.device | str) -> Self:
        """Return the same data on another device."""

    @property
    def labels(self) -> Tensor | None:
        """The class of each training sample (int64), if the data has classes."""
        return None

    @property
    def lengths(self) -> Tensor | None:
        """The length of each training sample, on the CPU, if lengths differ; batches hold similar lengths."""
        return None


@dataclass(frozen=True, kw_only=True)
class Task(Settings, ABC):
    """A model, its data and its metric. The fields are the settings; `batch_size` is per worker and step.

    All random draws of a step (dropout, crops of images) happen in `loss`, from torch's global generators:
    the loop seeds them by run, worker and step, so both worlds draw the same.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True
    models: ClassVar[tuple[str, ...]]
    manifest: ClassVar[DatasetManifest | None] = None  # None: no data to fetch
    max_norm: ClassVar[float | None] = None  # gradients are clipped to this norm before the optimizer's step
    step_s: ClassVar[float | None] = None  # of worker 0 in virtual time; None: as the cluster says
    shrinks_batches: ClassVar[bool] = True  # where there are too few samples for batches of `batch_size`

    model: Model = ""
    batch_size: BatchSize = 32
    epochs: Epochs = 10
    lr: LearningRate = 0.05

    def check(self) -> None:
        if not self.model:
            object.__setattr__(self, "model", self.models[0])
        if self.model not in self.models:
            raise SettingError(f"{self.name} has no model {self.model!r}{nearest(self.model, self.models)}")

    @abstractmethod
    def load(self, folder: Path | None = None) -> Data:
        """Read the data; `folder` matters only to data that is not shipped with the package."""

    @abstractmethod
    def build(self) -> nn.Module:
        """Build a new model with weights from torch's global generator, which the caller seeds."""

    @abstractmethod
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build the optimizer of this task."""

    def optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """Build all optimizers; more than one, such as Muon and AdamW, each for a part of the parameters."""
        return [self.optimizer(model)]

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the mean loss over the batch."""

    def gradient(self, model: nn.Module, batch: Batch) -> Tensor:
        """Add the loss's gradient to `grad` of each parameter, and return the detached loss."""
        with torch.enable_grad():
            loss = self.loss(model, batch)
            loss.backward()
        return loss.detach()

    @property
    def stacks(self) -> bool:
        """True if `stacked_gradient` computes what `gradient` does: the same class has defined both."""
        return promises(type(self), "stacked_gradient", "loss", "gradient")

    def stacked_gradient(self, model: nn.Module, batch: Batch, seed: Callable[[int], None]) -> Tensor:
        """Add the gradients of several virtual workers; return the first one's loss, detached.

        Each parameter of `model` has one row per worker, and `seed(row)` seeds torch's generators for it. The
        batch is the first worker's: only a task for which the size of a batch is all that matters can stack.
        """
        raise NotImplementedError

    def clip(self, model: nn.Module) -> None:
        """Clip the gradients, between backward and the optimizer's step."""
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)

    @abstractmethod
    def evaluate(self, model: nn.Module, data: Data) -> float:
        """Compute the metric on the test split; the model keeps its mode."""

    def extra_metrics(self, model: nn.Module, data: Data) -> dict[str, float]:
        """Compute further metrics on the test split, by name; targets are for `metric` only."""
        return {}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode, and afterwards restore the mode of each submodule: some may be frozen."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def count_samples(batch: Any) -> int:
    """Return the number of samples in a batch: the rows of its first tensor."""
    while not isinstance(batch, Tensor):
        if isinstance(batch, tuple):  # most are: a million virtual steps ask
            batch = batch[0]
        else:
            batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch))
    return batch.size(0)
