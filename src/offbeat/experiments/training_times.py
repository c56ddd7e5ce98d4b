"""Seconds that steps compute under a strategy in real training, with what exchanges take from a worker.

Time in which a worker waits for others or for the links is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from offbeat.attach import attach
from offbeat.core.strategy import Strategy
from offbeat.data.batching import batches
from offbeat.experiments.process_run import RunOptions
from offbeat.experiments.tasks import Data, Task

WARM_UP = 3
LONGEST_S = 60.0  # to wait for others that nobody reaches; twice the time of all steps


def computed_s(
    strategy: Strategy[Any],
    task: Task,
    data: Data,
    model: nn.Module,
    rank: int,
    world: int,
    options: RunOptions,
    steps: int,
    alone: bool = False,
) -> list[float]:
    """Train for so many steps; return the seconds that each computed, without those to warm up.

    `alone`: no worker waits for others, so each may do fewer steps, if they take long.
    """
    optimizers = task.optimizers(model)
    order = batches(len(data), rank, world, task.batch_size, 0, data.lengths)
    with attach(
        model,
        optimizers,
        strategy,
        timeout_s=min(options.timeout_s, LONGEST_S),
        bandwidth=options.emulation.bandwidth,
        insecure=options.insecure,
    ) as sync:
        computed = [sync.metrics.compute_s]
        for _ in gradients(task, data, model, order, WARM_UP + steps, LONGEST_S / 2 if alone else None):
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            computed.append(sync.metrics.compute_s)
        sync.close(publish=False)
    return [after - before for before, after in pairwise(computed)][WARM_UP:]


def gradients(
    task: Task, data: Data, model: nn.Module, order: Iterator[Tensor], steps: int, longest_s: float | None
) -> Iterator[None]:
    """Compute a gradient for each step; no more of them after `longest_s`."""
    model.zero_grad()  # what was timed before has left some
    began = time.monotonic()
    for number in range(steps):
        if longest_s is not None and number > WARM_UP and time.monotonic() - began > longest_s:
            return
        task.loss(model, data.batch(next(order))).backward()
        task.clip(model)
        yield
