"""What the loops of all frameworks train: a small net on fixed data, under a strategy given by name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from offbeat.strategies import STRATEGIES

SAMPLES, BATCH, ACCUMULATE, CLIP = 800, 4, 2, 0.5


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 3))


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Three classes that a small net can tell apart."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, 8, generator=generator)
        self.y = self.x[:, :3].argmax(1)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def accuracy(model: nn.Module) -> float:
    points = Points()
    model.eval()
    with torch.no_grad():
        found = float((model(points.x).argmax(1) == points.y).float().mean())
    model.train()
    return found


def main(train: Callable[[dict[str, Any]], None]) -> None:
    """Train in all the ways that the test asks for, one after the other, as JSON on the command line.

    how        "ddp" or a strategy's name, with `settings`
    out        the folder for what comes out
    stop       the step, or batch, after which to stop; None: the end
    resume     the checkpoint to go on from
    bf16       whether the framework computes in bfloat16, with weights in single precision
    """
    for wished in json.loads(sys.argv[1]):
        train({"settings": {}, "resume": None, "stop": None, "bf16": False, **wished})
    dist.destroy_process_group()


def strategy_of(wished: dict[str, Any]) -> Any:
    return STRATEGIES[wished["how"]](**wished["settings"])


def report(wished: dict[str, Any], model: nn.Module, **more: Any) -> None:
    """Leave what this rank has come to."""
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    torch.save({"state": state, **more}, Path(wished["out"]) / f"rank-{dist.get_rank()}.pt")
