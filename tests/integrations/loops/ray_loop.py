"""A loop as Ray Train's users write it, with accumulation and clipping, under DDP or a strategy."""

from __future__ import annotations

from typing import Any

import ray.train.torch
import torch
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
    model = ray.train.torch.prepare_model(net()) if ddp else prepare_model(net(), strategy_of(wished))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = ray.train.torch.prepare_data_loader(DataLoader(Points(), BATCH))
    train_batches(loader, model, model.no_sync, optimizer, wished)
    steps = 0
    if isinstance(model, OffbeatModel):
        steps = model.sync.metrics.steps
        model.sync.close()
    report(wished, model.module, accuracy=accuracy(model), steps=steps)
