"""Seconds of a worker's own time for an exchange with a server, as virtual time charges them.

A worker of ASP pushes and pulls at every step, in the background, and waits for nobody. So what its steps
compute for longer than steps without communication is the exchange's doing: the update that it makes, the
weights that it copies, and the threads and shards that take turns with it on its cores. Time in which it
waits for the link is not counted. Half of it counts as the worker's own part, the other half as that of the
shard beside it: both ends encrypt, copy and wake up alike, and a shard does so for all workers.
"""

from __future__ import annotations

import logging
import statistics
import time
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

STEPS, WARM_UP = 24, 3
LONGEST_S = 60.0  # to wait for a server that nobody reaches; twice the time of all steps
log = logging.getLogger("offbeat")


def time_exchange(
    task: Task, data: Data, model: nn.Module, rank: int, world: int, options: RunOptions, alone_s: float
) -> float:
    """Measure the seconds per byte that a worker, or a shard beside it, exchanges: beyond steps of `alone_s`.

    0, with a warning, if that fails: no server may be able to train the task, or nobody reaches it.
    """
    try:
        steps_s = _served_steps(task, data, model, rank, world, options)
    except OffbeatError as failed:
        log.warning("rank %d: an exchange with a server was not timed, and costs nothing: %s", rank, failed)
        return 0.0
    both_ways, both_ends = 2, 2
    longer_s = statistics.mean(steps_s[WARM_UP:]) - alone_s
    return max(0.0, longer_s) / (both_ways * both_ends * trainable_bytes(model))


def _served_steps(
    task: Task, data: Data, model: nn.Module, rank: int, world: int, options: RunOptions
) -> list[float]:
    """Train with ASP; return the seconds that each step computes."""
    optimizers = task.optimizers(model)
    order = batches(len(data), rank, world, task.batch_size, 0, data.lengths)
    with attach(
        model,
        optimizers,
        ASP(push="update"),
        timeout_s=min(options.timeout_s, LONGEST_S),
        bandwidth=options.emulation.bandwidth,
        insecure=options.insecure,
    ) as sync:
        computed = [sync.metrics.compute_s]
        for _ in _steps(task, data, model, order):
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            computed.append(sync.metrics.compute_s)
        sync.close(publish=False)
    return [after - before for before, after in pairwise(computed)]


def _steps(task: Task, data: Data, model: nn.Module, order: Iterator[Tensor]) -> Iterator[None]:
    """Compute a gradient for each step; of steps that take long, fewer."""
    model.zero_grad()  # what was timed before has left some
    enough_s = time.monotonic() + LONGEST_S / 2
    for number in range(WARM_UP + STEPS):
        if number > WARM_UP and time.monotonic() > enough_s:
            return
        task.loss(model, data.batch(next(order))).backward()
        task.clip(model)
        yield
