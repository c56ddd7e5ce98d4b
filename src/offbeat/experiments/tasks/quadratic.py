"""The quadratic task: real gradients and a known optimum, at next to no cost.

    loss(w) = ½ Σ a_j w_j²        a worker's gradient = a ⊙ w + noise/√batch · ξ,   ξ ~ N(0, I)

Gradients are cheap enough for ten thousand virtual workers, so decisions that depend on gradients stay real.
The curvatures a_j run evenly from 1 down to 1/10; training starts at w = 1; the optimum, w = 0, has loss 0.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.core.fields import Number, Whole
from offbeat.experiments.tasks.base import Batch, BatchSize, Data, Epochs, LearningRate, Task

FLATTEST = 0.1


class SampleIndices(Data):
    """Samples that are only their indices: the noise that makes them differ is drawn with the gradient."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def batch(self, indices: Tensor) -> Batch:
        return (indices,)

    def test_batches(self) -> Iterator[Batch]:
        return iter(())

    def to(self, device: torch.device | str) -> Self:
        return self


class Point(nn.Module):
    """The model: a point in space that training moves to the optimum."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(dimension))


@lru_cache(maxsize=8)
def half_curvatures(dimension: int, device: torch.device) -> Tensor:
    """Return half the curvature of each dimension, from 1 down to `FLATTEST`."""
    return torch.linspace(1.0, FLATTEST, dimension, device=device) / 2


class Descent(Optimizer):
    """w ← w − η g, without torch's bookkeeping at every step, which is ten times the arithmetic.

    `hooked` keeps torch from wrapping `step` in its profiler, so `step` itself runs the hooks of strategies.
    """

    elementwise = True
    linear_rate = True

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__(model.parameters(), {"lr": lr})

    def descend(self) -> None:
        """Update the parameters, without hooks."""
        group = self.param_groups[0]
        for w in group["params"]:
            if w.grad is not None:
                w.data.add_(w.grad, alpha=-group["lr"])

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for before in self._optimizer_step_pre_hooks.values():
            before(self, (), {})
        self.descend()
        for after in self._optimizer_step_post_hooks.values():
            after(self, (), {})

    step.hooked = True  # type: ignore[attr-defined]
    step.__wrapped__ = descend  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class Quadratic(Task):
    """A noisy quadratic. `samples` and `batch_size` only set an epoch's length and the noise."""

    name: ClassVar[str] = "quadratic"
    summary: ClassVar[str] = "a noisy quadratic with a known optimum, for thousands of virtual workers"
    metric: ClassVar[str] = "loss"
    higher_is_better: ClassVar[bool] = False
    models: ClassVar[tuple[str, ...]] = ("point",)

    batch_size: BatchSize = 8
    epochs: Epochs = 1
    lr: LearningRate = 0.1
    dimension: Annotated[int, Whole("number of trained parameters", at_least=1)] = 100
    noise: Annotated[
        float, Number("standard deviation of a sample's gradient", noun="a finite number", at_least=0)
    ] = 1.0
    samples: Annotated[int, Whole("samples per epoch", of="samples", at_least=1)] = 1_048_576

    def load(self, folder: Path | None = None) -> SampleIndices:
        return SampleIndices(self.samples)

    def build(self) -> nn.Module:
        return Point(self.dimension)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Descent(model, self.lr)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the loss without noise; its gradient has noise."""
        w = model.get_parameter("w")
        here = w.detach()
        return (self._half_curvatures(w) * w * w).sum() + (self._noise(here, batch) * (w - here)).sum()

    def gradient(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the gradient in closed form: autograd would cost ten times the arithmetic."""
        parameter = model._parameters["w"]  # `model.w` goes through `__getattr__`, as slow as the arithmetic
        assert parameter is not None
        w = parameter.detach()
        half = self._half_curvatures(w) * w
        gradient = self._noise(w, batch).add_(half, alpha=2)
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return torch.dot(w, half)

    def stacked_gradient(self, model: nn.Module, batch: Batch, seed: Callable[[int], None]) -> Tensor:
        parameter = model.get_parameter("w")
        w = parameter.detach()
        half = self._half_curvatures(w) * w
        noise = torch.empty_like(half)
        scale = self._noise_scale(batch)
        for row, of_worker in enumerate(noise.unbind()):
            seed(row)
            of_worker.normal_(0.0, scale)
        parameter.grad = noise.add_(half, alpha=2)
        return torch.dot(w[0], half[0])

    def evaluate(self, model: nn.Module, data: Data) -> float:
        w = model.get_parameter("w").detach()
        return torch.dot(w, self._half_curvatures(w) * w).item()

    def _noise(self, like: Tensor, batch: Batch) -> Tensor:
        return torch.empty_like(like).normal_(0.0, self._noise_scale(batch))

    def _noise_scale(self, batch: Batch) -> float:
        return self.noise / math.sqrt(batch[0].size(0))

    def _half_curvatures(self, like: Tensor) -> Tensor:
        return half_curvatures(self.dimension, like.device)
