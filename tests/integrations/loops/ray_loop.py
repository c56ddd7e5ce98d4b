"""A loop as Ray Train's users write it, with accumulation and clipping, under DDP or a strategy."""

from __future__ import annotations

from typing import Any

import ray.train.torch
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from offbeat.integrations.ray import OffbeatModel, prepare_model
from tests.integrations.loops.common import BATCH, Points, accuracy, net, report, strategy_of
from tests.integrations.loops.plain_loop import train_batches


def train_all(config: dict[str, Any]) -> None:
    """Train in several ways, one after the other, in the same two workers."""
    for wished in config["wishes"]:
        train(wished)


def train(wished: dict[str, Any]) -> None:
    ddp = wished["how"] == "ddp"
    given = net()
    with torch.no_grad():
        given[0].weight.add_(dist.get_rank())  # worker 0's count
    model = ray.train.torch.prepare_model(given) if ddp else prepare_model(given, strategy_of(wished))
    begun = model.module[0].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = ray.train.torch.prepare_data_loader(DataLoader(Points(), BATCH))
    train_batches(loader, model, model.no_sync, optimizer, wished)
    steps = 0
    if isinstance(model, OffbeatModel):
        steps = model.sync.metrics.steps
        model.sync.close()
    report(wished, model.module, accuracy=accuracy(model), steps=steps, begun=begun)
