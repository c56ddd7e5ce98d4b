"""Seconds of a worker's own time for an exchange with a server, as virtual time charges them.

A worker of ASP pushes and pulls at every step, in the background, and waits for nobody. So what its steps
compute for longer than steps without communication is the exchange's doing: the update that it makes, the
weights that it copies, and the threads and shards that take turns with it on its cores. Time in which it
waits for the link is not counted.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterator
from itertools import pairwise

from torch import Tensor, nn

from offbeat.attach import attach
from offbeat.core.blocks import trainable_bytes
from offbeat.data.batching import batches
from offbeat.errors import OffbeatError
from offbeat.experiments.process_run import RunOptions
from offbeat.experiments.tasks import Data, Task
from offbeat.strategies.asp import ASP

STEPS, WARM_UP = 10, 2
log = logging.getLogger("offbeat")


def time_exchange(
    task: Task, data: Data, model: nn.Module, rank: int, world: int, options: RunOptions, alone_s: float
) -> float:
    """Measure a worker's seconds per byte that it pushes and pulls, beyond a step that takes `alone_s`.

    0 if the task cannot train with a server.
    """
    optimizers = task.optimizers(model)
    order = batches(len(data), rank, world, task.batch_size, 0, data.lengths)
    try:
        sync = attach(
            model,
            optimizers,
            ASP(push="update"),
            timeout_s=options.timeout_s,
            bandwidth=options.emulation.bandwidth,
            insecure=options.insecure,
        )
    except OffbeatError as refused:
        log.info("the exchange with a server is not timed: %s", refused)
        return 0.0
    computed = [sync.metrics.compute_s]
    with sync:
        for _ in _steps(task, data, model, order):
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            computed.append(sync.metrics.compute_s)
        sync.close(publish=False)
    steps_s = [after - before for before, after in pairwise(computed)]
    return max(0.0, statistics.median(steps_s[WARM_UP:]) - alone_s) / (2 * trainable_bytes(model))


def _steps(task: Task, data: Data, model: nn.Module, order: Iterator[Tensor]) -> Iterator[None]:
    """Compute a gradient for each step."""
    for _ in range(WARM_UP + STEPS):
        task.loss(model, data.batch(next(order))).backward()
        task.clip(model)
        yield
