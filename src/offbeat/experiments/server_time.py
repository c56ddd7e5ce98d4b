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

from torch import nn

from offbeat.core.blocks import trainable_bytes
from offbeat.errors import OffbeatError
from offbeat.experiments.process_run import RunOptions
from offbeat.experiments.tasks import Data, Task
from offbeat.experiments.training_times import computed_s
from offbeat.strategies.asp import ASP

STEPS = 24
log = logging.getLogger("offbeat")


def time_exchange(
    task: Task, data: Data, model: nn.Module, rank: int, world: int, options: RunOptions, alone_s: float
) -> float:
    """Measure the seconds per byte that a worker, or a shard beside it, exchanges: beyond steps of `alone_s`.

    0, with a warning, if that fails: no server may be able to train the task, or nobody reaches it.
    """
    try:
        steps_s = computed_s(ASP(push="update"), task, data, model, rank, world, options, STEPS, alone=True)
    except OffbeatError as failed:
        log.warning("rank %d: an exchange with a server was not timed, and costs nothing: %s", rank, failed)
        return 0.0
    both_ways, both_ends = 2, 2
    longer_s = statistics.mean(steps_s) - alone_s
    return max(0.0, longer_s) / (both_ways * both_ends * trainable_bytes(model))
