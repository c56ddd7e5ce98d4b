"""What the loops of all frameworks train: a small net on fixed data, under a strategy given by name."""

from __future__ import annotations

import json
import os
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
SCALE = 2.0**24  # of a GradScaler at the beginning: the first steps overflow in float16, and are skipped


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
    device = next(model.parameters()).device
    model.eval()
    with torch.no_grad():
        found = float((model(points.x.to(device)).argmax(1).cpu() == points.y).float().mean())
    model.train()
    return found


def main(train: Callable[[dict[str, Any]], None]) -> None:
    """Train in all the ways that the test asks for, one after the other, as JSON on the command line.

    how        "ddp" or a strategy's name, with `settings`
    out        the folder for what comes out
    stop       the step, or batch, after which to stop; None: the end
    resume     the checkpoint to go on from
    precision  "no", or "bf16" or "fp16" to compute in, with weights in single precision
    device     "cpu" or "cuda"
    """
    for wished in wishes():
        if wished["device"] == "cuda":
            share_one_gpu()
        train(wished)
    dist.destroy_process_group()


def wishes() -> list[dict[str, Any]]:
    defaults = {"settings": {}, "resume": None, "stop": None, "precision": "no", "device": "cpu"}
    return [{**defaults, **wished} for wished in json.loads(sys.argv[1])]


def share_one_gpu() -> None:
    """Let each rank take itself for the only one on its host, so that all use the first GPU."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=os.environ["RANK"])


def scaler_of(wished: dict[str, Any]) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(wished["device"], init_scale=SCALE, enabled=wished["precision"] == "fp16")


def give_scaler(accelerator: Any, wished: dict[str, Any]) -> None:
    """Let Accelerate compute in float16, also on CPUs, where it has none, with a scaler of ours."""
    if wished["precision"] == "fp16":
        accelerator.native_amp = True
        accelerator.scaler = scaler_of(wished)


def strategy_of(wished: dict[str, Any]) -> Any:
    return STRATEGIES[wished["how"]](**wished["settings"])


def report(wished: dict[str, Any], model: nn.Module, **more: Any) -> None:
    """Leave what this rank has come to."""
    state = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    torch.save({"state": state, **more}, Path(wished["out"]) / f"rank-{dist.get_rank()}.pt")
