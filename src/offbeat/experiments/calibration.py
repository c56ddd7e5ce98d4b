"""Calibration: what a step and an operation really take on the machines at hand, as a cluster to simulate.

All ranks compute at once, as they do in training, but without exchanging anything; the links are timed with
all-reduces of two sizes, which give the rate and the fixed cost of an operation, and of a small one, which is
the most that this cost can be.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offbeat.core.blocks import block_sizes, make_blocks, trainable_bytes
from offbeat.core.pending import block_on
from offbeat.core.port import Op
from offbeat.data.batching import batches
from offbeat.experiments.tasks import Data, Task
from offbeat.worlds.processes.port import ProcessPort
from offbeat.worlds.virtual.cluster import Cluster, Workers
from offbeat.worlds.virtual.step_times import Measured

WARM_UP = 3
SMALL_BYTES = 1 << 12
SIZES_BYTES = (1 << 20, 4 << 20)
REPEATS = 5


@dataclass(frozen=True)
class StepTimes:
    """One rank's steps: their seconds, and at which share of a step what is done."""

    seconds: list[float]
    forward_share: float
    update_share: float
    ready: list[float]


def time_steps(
    task: Task, data: Data, model: nn.Module, rank: int, world: int, steps: int, seed: int = 0
) -> StepTimes:
    """Time steps of the plain loop, and when each block's gradient is complete."""
    optimizer = task.optimizer(model)
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    blocks = make_blocks(trained, *block_sizes(trainable_bytes(model)))
    stamps: dict[int, float] = {}
    handles = [
        param.register_post_accumulate_grad_hook(
            lambda _, index=block.index: stamps.__setitem__(index, time.perf_counter())
        )
        for block in blocks
        for param in block.params
    ]
    order = batches(len(data), rank, world, task.batch_size, seed, data.lengths)
    seconds, forward, update, ready = [], [], [], []
    for step in range(WARM_UP + steps):
        began = time.perf_counter()
        batch = data.batch(next(order))
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        computed = time.perf_counter()
        loss.backward()
        ended = time.perf_counter()
        task.clip(model)
        optimizer.step()
        took = time.perf_counter() - began
        if step >= WARM_UP:
            seconds.append(took)
            forward.append((computed - began) / took)
            update.append((began + took - ended) / took)
            ready.append([(stamps.get(block.index, ended) - began) / took for block in blocks])
    for handle in handles:
        handle.remove()
    medians = [statistics.median(shares) for shares in zip(*ready, strict=True)]
    return StepTimes(
        seconds=seconds,
        forward_share=statistics.median(forward),
        update_share=statistics.median(update),
        ready=sorted(min(share, 1 - statistics.median(update)) for share in medians),
    )


def time_links(port: ProcessPort, like: Tensor) -> tuple[float, float]:
    """Bits a second out of each NIC in a ring all-reduce, and the seconds that any operation costs."""
    small = time_reduce(port, like, SMALL_BYTES)
    first, second = (time_reduce(port, like, size) for size in SIZES_BYTES)
    on_wire = [2 * (port.world - 1) / port.world * size for size in SIZES_BYTES]
    bytes_per_s = (on_wire[1] - on_wire[0]) / max(second - first, 1e-9)
    # What a message of a block's size costs beside its bytes. Shapers let the first bytes after a pause pass
    # at once, so it may be less than what a small message takes.
    fixed_s = first - on_wire[0] / bytes_per_s
    return 8 * bytes_per_s, min(small, max(0.0, fixed_s))


def time_reduce(port: ProcessPort, like: Tensor, nbytes: int) -> float:
    """The median seconds of an all-reduce that all ranks start together."""
    tensor = torch.zeros(nbytes // 4, dtype=torch.float32, device=like.device)
    gate = torch.zeros(1, device=like.device)
    took = []
    for _ in range(REPEATS + 1):
        block_on(_wait(port, gate))
        began = time.perf_counter()
        block_on(_wait(port, tensor))
        took.append(time.perf_counter() - began)
    return statistics.median(took[1:])


async def _wait(port: ProcessPort, tensor: Tensor) -> None:
    await port.all_reduce(tensor, Op.SUM)


def cluster_of(summary: str, ranks: list[StepTimes], bits_per_s: float, operation_s: float) -> Cluster:
    """A cluster with one group a rank."""
    groups = tuple(
        Workers(
            step_s=Measured(measured_s=tuple(times.seconds), ready=tuple(times.ready)),
            up_bits_per_s=bits_per_s,
            down_bits_per_s=bits_per_s,
        )
        for times in ranks
    )
    return Cluster(
        workers=groups,
        operation_s=operation_s,
        forward_share=statistics.median(times.forward_share for times in ranks),
        update_share=statistics.median(times.update_share for times in ranks),
        summary=summary,
    )
