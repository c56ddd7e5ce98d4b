"""A loop without a framework: autocast, a GradScaler, accumulation and clipping, under DDP or a strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import offbeat
from tests.integrations.loops.common import (
    ACCUMULATE,
    BATCH,
    CLIP,
    Points,
    accuracy,
    main,
    net,
    report,
    scaler_of,
    strategy_of,
)

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def train(wished: dict[str, Any]) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    trained = net().to(wished["device"])
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
    ddp = wished["how"] == "ddp"
    model = DistributedDataParallel(trained) if ddp else trained
    sync = None if ddp else offbeat.attach(model, optimizer, strategy_of(wished))
    points = Points()
    loader = DataLoader(points, BATCH, sampler=DistributedSampler(points))
    scale = train_batches(loader, model, (sync or model).no_sync, optimizer, wished)
    steps = sync.metrics.steps if sync else 0
    if sync:
        sync.close()
    report(wished, trained, accuracy=accuracy(trained), steps=steps, scale=scale)


def train_batches(
    loader: Iterable[Any],
    model: nn.Module,
    no_sync: Callable[[], AbstractContextManager[None]],
    optimizer: torch.optim.Optimizer,
    wished: dict[str, Any],
) -> float:
    """Train on all batches; return the scale that the GradScaler ends with."""
    scaler = scaler_of(wished)
    device = wished["device"]
    for number, (x, y) in enumerate(loader, 1):
        last = number % ACCUMULATE == 0
        with nullcontext() if last else no_sync():
            with torch.autocast(device, DTYPES[wished["precision"]], enabled=wished["precision"] != "no"):
                loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device)) / ACCUMULATE
            scaler.scale(loss).backward()
        if last:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return scaler.get_scale()


if __name__ == "__main__":
    main(train)
