"""What loops and models out there do: each a model, an optimizer and options of the training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offbeat
from tests.support import loops
from tests.support.limits import HANG_S

Model = Callable[[int], nn.Module]


def frozen(seed: int) -> nn.Module:
    model = loops.mlp(seed)
    model[2].requires_grad_(False)
    return model


class Spare(nn.Module):
    """A layer that is never used, or by some batches only; weight decay must leave it alone meanwhile."""

    def __init__(self, seed: int, ever: bool) -> None:
        super().__init__()
        self.body = loops.mlp(seed)
        self.spare = nn.Linear(20, 5)
        self.ever = ever

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out + self.spare(x) if self.ever and x[0, 0] > 0 else out


def unused(seed: int) -> nn.Module:
    return Spare(seed, ever=False)


def used_now_and_then(seed: int) -> nn.Module:
    return Spare(seed, ever=True)


def batch_norm(seed: int) -> nn.Module:
    torch.default_generator.manual_seed(seed)  # torch.manual_seed formats three tracebacks per call
    return nn.Sequential(nn.Linear(20, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))


def tied(seed: int) -> nn.Module:
    torch.default_generator.manual_seed(seed)  # torch.manual_seed formats three tracebacks per call
    model = nn.Sequential(nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 5))
    model[2].weight = model[0].weight
    return model


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


def mixed_dtypes(seed: int) -> nn.Module:
    torch.default_generator.manual_seed(seed)  # torch.manual_seed formats three tracebacks per call
    to_double = [Cast(torch.float64), nn.Linear(16, 16).double()]
    return nn.Sequential(nn.Linear(20, 16), *to_double, Cast(torch.float32), nn.Linear(16, 5))


def channels_last(seed: int) -> nn.Module:
    torch.default_generator.manual_seed(seed)  # torch.manual_seed formats three tracebacks per call
    layers = [nn.Unflatten(1, (1, 4, 5)), nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8, 5)).to(memory_format=torch.channels_last)


class Checkpointed(nn.Module):
    """Layers whose activations are computed a second time, in backward."""

    def __init__(self, seed: int, reentrant: bool) -> None:
        super().__init__()
        self.body = loops.mlp(seed)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.body
        x = first(x)
        for layer in others:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def checkpointed(seed: int) -> nn.Module:
    return Checkpointed(seed, reentrant=False)


def checkpointed_reentrant(seed: int) -> nn.Module:
    return Checkpointed(seed, reentrant=True)


@dataclass(frozen=True)
class Feature:
    model: Model = loops.mlp
    optimizer: str = "momentum"
    schedule: bool = False
    scale: float | None = None  # a GradScaler's first scale
    options: dict[str, Any] = field(default_factory=dict)  # of loops.train


FEATURES = {
    "sgd": Feature(optimizer="sgd"),
    "momentum": Feature(),
    "adamw": Feature(optimizer="adamw"),
    "two optimizers": Feature(optimizer="pair"),
    "schedule": Feature(schedule=True),
    "autocast": Feature(options={"autocast": True}),
    "scaler": Feature(scale=1024.0),
    "accumulation": Feature(options={"accumulate": 2}),
    "accumulation of two optimizers": Feature(optimizer="pair", options={"accumulate": 3, "clip": 0.1}),
    "clipping": Feature(options={"clip": 0.1}),
    "scaler and clipping": Feature(scale=1024.0, options={"clip": 0.1}),
    "grads zeroed in place": Feature(options={"set_to_none": False}),
    "frozen": Feature(frozen),
    "unused": Feature(unused),
    "used now and then": Feature(used_now_and_then),
    "used now and then, zeroed": Feature(used_now_and_then, options={"set_to_none": False}),
    "batch norm": Feature(batch_norm),
    "tied": Feature(tied, "adamw"),
    "mixed dtypes": Feature(mixed_dtypes, "adamw"),
    "channels last": Feature(channels_last),
    "checkpointed": Feature(checkpointed),
    "checkpointed, reentrant": Feature(checkpointed_reentrant),
}

every_feature = pytest.mark.parametrize("feature", FEATURES)


def loop(feature: str, model: nn.Module, train_on: nn.Module, rank: int, steps: int, **more: Any) -> None:
    """Train `model`, calling it through `train_on` (itself, or DDP's wrapper)."""
    wanted = FEATURES[feature]
    optimizer = more.pop("optimizer", None) or loops.OPTIMIZERS[wanted.optimizer](model)
    if wanted.schedule:
        more["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    if wanted.scale is not None:
        more["scaler"] = torch.amp.GradScaler("cpu", init_scale=wanted.scale)
    data = more.pop("data", None) or loops.batches(rank, steps * wanted.options.get("accumulate", 1))
    loops.train(train_on, optimizer, data, **wanted.options, **more)


def attached(
    feature: str,
    strategy: offbeat.Strategy[Any],
    rank: int,
    steps: int,
    make: loops.Make | None = None,
    **more: Any,
) -> tuple[nn.Module, Any, dict[str, Tensor]]:
    """Train under a strategy: the model, the metrics, and the tensors that all agreed on in the end."""
    wanted = FEATURES[feature]
    model = wanted.model(rank)
    optimizer = (make or loops.OPTIMIZERS[wanted.optimizer])(model)
    with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S) as sync:
        ours = {"no_sync": sync.no_sync, "samples": sync.samples, "optimizer": optimizer}
        loop(feature, model, model, rank, steps, **ours, **more)
        metrics = sync.metrics
        sync.settle()
        with sync.consensus():
            agreed = loops.tensors(model)
        sync.close(publish=False)  # each rank's own weights are looked at
    return model, metrics, agreed


def spoilt(data: Iterator[tuple[Tensor, Tensor]], at: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The same data, but the batch number `at` makes every gradient overflow."""
    for i, (x, y) in enumerate(data):
        yield x.fill_(torch.inf) if i == at else x, y
