"""How much time and memory does attach() add to a step?

    python -m benchmarks run attach_cost

One process runs the bare loop, and the same loop with a strategy that never communicates, in alternating
rounds. Goals: at most 1% of a CNN's step, under 150 µs per step of an MLP. The notes compare the memory of
all tensors after some steps: BSP may hold one more copy of the gradients than the bare loop.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

import offbeat
from benchmarks.overhead.memory import live_bytes
from benchmarks.support.options import benchmark_parser
from benchmarks.support.tables import Table, interval
from benchmarks.support.training import random_batch, train_step
from offbeat.experiments.tasks import task

STEPS = {"mlp": 10, "cnn": 1}  # per round; few, because the machine's speed drifts
SILENT = offbeat.LocalSGD(period=1_000_000_000)


def time_steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> float:
    """Return the mean seconds per step."""
    batch = random_batch()
    start = time.perf_counter()
    for _ in range(count):
        train_step(model, optimizer, *batch)
    return (time.perf_counter() - start) / count


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("attach_cost", __doc__)
    parser.add_argument("--rounds", type=int, default=300)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    table = Table(
        "attach_cost",
        __doc__ or "",
        ["model", "bare ms", "attached ms", "difference µs", "of a step", "middle half µs", "goal"],
    )
    for name, goal in (("mlp", "< 150 µs"), ("cnn", "≤ 1%")):
        what = task("fashion-mnist", model=name)
        bare, attached = what.build(), what.build()
        bare_optimizer, optimizer = what.optimizer(bare), what.optimizer(attached)
        pairs = []
        with offbeat.attach(attached, optimizer, SILENT):
            for round_ in range(options.rounds + 2):
                turns = [(bare, bare_optimizer), (attached, optimizer)]
                order = (0, 1) if round_ % 2 else (1, 0)
                seconds = {turn: time_steps(*turns[turn], STEPS[name]) for turn in order}
                pairs.append((seconds[0], seconds[1]))
        pairs = pairs[2:]
        extra_us = [1e6 * (b - a) for a, b in pairs]
        fraction = statistics.median(extra_us) / (1e6 * statistics.median(a for a, _ in pairs))
        table.row(
            name,
            f"{1e3 * statistics.median(a for a, _ in pairs):.3f}",
            f"{1e3 * statistics.median(b for _, b in pairs):.3f}",
            f"{statistics.median(extra_us):.0f}",
            f"{fraction:.2%}",
            interval(extra_us),
            goal,
        )
        del bare, attached, bare_optimizer, optimizer
    for strategy in (None, SILENT, offbeat.BSP()):
        gc.collect()  # the last one's, which hooks and models hold in a circle
        before = live_bytes()
        what = task("fashion-mnist", model="mlp")
        model = what.build()
        optimizer = what.optimizer(model)
        size = sum(p.nbytes for p in model.parameters())
        sync = offbeat.attach(model, optimizer, strategy) if strategy else None
        time_steps(model, optimizer, 3)
        held = (live_bytes() - before) / size
        name = strategy.name if strategy else "bare loop"
        table.note(
            f"memory after 3 steps, {name}: {held:.3f} times the weights (weights, gradients, momentum)"
        )
        if sync is not None:
            sync.close()
        del model, optimizer, sync
    table.write()
