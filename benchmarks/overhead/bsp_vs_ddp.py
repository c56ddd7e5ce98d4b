"""Is a BSP step as fast as a step of torch's DDP?

    python -m benchmarks run bsp_vs_ddp

Four emulated hosts train the same model under DDP and under attach(BSP), in the same processes and in
alternating rounds. The table shows the median ratio of the step times for each model and rate.
Goal: at most 1.03.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from benchmarks.support.hosts import Hosts
from benchmarks.support.limits import ring_s
from benchmarks.support.options import benchmark_parser
from benchmarks.support.tables import Table, interval
from benchmarks.support.training import random_batch, train_step
from benchmarks.support.workers import run_on_hosts
from offbeat.experiments.tasks import task
from offbeat.worlds.processes.emulation import pace

HOSTS = 4
RATES = ("1gbit", "200mbit")
MODELS = ("mlp", "cnn")


def time_steps(forward: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> float:
    """Return the mean seconds per step of an ordinary loop."""
    batch = random_batch()
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        train_step(forward, optimizer, *batch)
        seconds.append(time.perf_counter() - start)
    return statistics.mean(seconds)


def work(model_name: str, pace_s: float, rounds: int, steps: int) -> None:
    """Train one rank in alternating rounds of DDP and BSP; rank 0 prints the mean step times."""
    dist.init_process_group("gloo")
    what = task("fashion-mnist", model=model_name)
    contenders = []
    for _ in range(2):
        torch.manual_seed(0)
        model = what.build()
        if pace_s:
            pace(model, pace_s)
        contenders.append((model, what.optimizer(model)))
    (theirs, their_optimizer), (ours, our_optimizer) = contenders
    ddp = DistributedDataParallel(theirs)
    rows = []
    with offbeat.attach(ours, our_optimizer, offbeat.BSP()):
        time_steps(ddp, their_optimizer, 5)
        time_steps(ours, our_optimizer, 5)
        for round_ in range(rounds):
            turns = [("ddp", ddp, their_optimizer), ("bsp", ours, our_optimizer)]
            if round_ % 2:
                turns.reverse()
            row = {}
            for name, forward, optimizer in turns:
                dist.barrier()
                row[name] = time_steps(forward, optimizer, steps)
            rows.append(row)
    if dist.get_rank() == 0:
        print(json.dumps(rows))


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("bsp_vs_ddp", __doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20, help="steps per round")
    parser.add_argument("--worker", nargs=2, metavar=("MODEL", "PACE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work(options.worker[0], float(options.worker[1]), options.rounds, options.steps)
        return
    table = Table(
        "bsp_vs_ddp",
        __doc__ or "",
        ["rate", "model", "computation", "DDP ms", "BSP ms", "BSP / DDP", "by round", "goal"],
    )
    with Hosts(count=HOSTS, rate=RATES[0]) as hosts:
        for rate in RATES:
            hosts.set_rate(rate)
            table.note(hosts.describe_link())
            bytes_per_s = min(hosts.probe())
            for model in MODELS:
                nbytes = sum(p.nbytes for p in task("fashion-mnist", model=model).build().parameters())
                ring_ms = 1e3 * ring_s(nbytes, HOSTS, bytes_per_s)
                table.note(
                    f"limit for {model} at {rate}: a ring all-reduce of its {nbytes / 1e6:.2f} MB takes "
                    f"K = {ring_ms:.1f} ms; with computation C no step is shorter than max(C, K)"
                )
                for pace_s in (0.0, 0.06):
                    settings = ["--rounds", options.rounds, "--steps", options.steps]
                    worker = ["--worker", model, pace_s, *settings]
                    rows = run_on_hosts(hosts, "bsp_vs_ddp", *worker, timeout=600)
                    ddp, bsp = ([row[name] for row in rows] for name in ("ddp", "bsp"))
                    ratios = [b / d for d, b in zip(ddp, bsp, strict=True)]
                    table.row(
                        rate,
                        model,
                        f"paced {1000 * pace_s:.0f} ms" if pace_s else "unpaced",
                        f"{1000 * statistics.median(ddp):.1f}",
                        f"{1000 * statistics.median(bsp):.1f}",
                        f"{statistics.median(ratios):.3f}",
                        interval(ratios),
                        "≤ 1.03",
                    )
    table.write()
