"""A few real training steps of a task, on one worker."""

from __future__ import annotations

from itertools import islice

import torch
from torch import nn

from offbeat.data.batching import batches
from offbeat.experiments.tasks import Data, Task


def learn(chosen: Task, data: Data, steps: int) -> nn.Module:
    torch.manual_seed(0)
    model = chosen.build()
    optimizer = chosen.optimizer(model)
    order = batches(len(data), 0, 1, chosen.batch_size, 0, data.lengths)
    for indices in islice(order, steps):
        optimizer.zero_grad()
        chosen.loss(model, data.batch(indices)).backward()
        chosen.clip(model)
        optimizer.step()
    return model
