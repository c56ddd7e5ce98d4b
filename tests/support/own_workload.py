"""A user's own model and data, small and without anything of Offbeat's: what `file.py:build` would name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

SAMPLES = 64


def regression() -> tuple[Tensor, Tensor]:
    """Sixty-four samples of a linear function."""
    inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
    return inputs, inputs.sum(dim=1, keepdim=True)


def net() -> nn.Module:
    """A small network with batch norm, so that it has buffers."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def squared_error(model: nn.Module, batch: Any) -> Tensor:
    return functional.mse_loss(model(batch[0]), batch[1])


def error_on_all(model: nn.Module) -> float:
    return squared_error(model, regression()).item()


def build() -> dict[str, Any]:
    return {
        "model": net,
        "loss": squared_error,
        "data": regression(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        "evaluate": error_on_all,
        "higher_is_better": False,
        "batch_size": 8,
        "epochs": 3,
    }


PARTS = build()  # is no function


def build_a_list() -> list[int]:
    return [1, 2]


def build_without_a_loss() -> dict[str, Any]:
    return {name: part for name, part in build().items() if name != "loss"}


def build_with_a_typo() -> dict[str, Any]:
    return {**build(), "batchsize": 3}
