"""Are OSP and SSD-SGD as accurate as BSP?

    python -m benchmarks run overlap_accuracy --data FOLDER

Fashion-MNIST's MLP, four workers of 32 samples, two epochs (936 steps) at the task's own learning rate and
momentum (0.02, 0.9), three seeds. Virtual time, on a network where an all-reduce takes as long as a step's
computation: the case for overlapping strategies. The table shows the final test accuracy (mean of the seeds,
lowest and highest), and its difference from BSP's. Goal: at most half a point below.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.support.options import add_data_option, benchmark_parser, require_data
from benchmarks.support.tables import Table, spread
from offbeat import BSP, OSP, SSDSGD, Strategy
from offbeat.experiments.job import Job
from offbeat.experiments.tasks.mnist import FashionMnist
from offbeat.experiments.virtual_run import simulate
from offbeat.worlds.virtual.cluster import Cluster, Workers

SEEDS = (0, 1, 2)
STEPS = 936
WORKERS = 4
STEP_S = 0.05
NBYTES = 4 * 669_706  # of the MLP


def strategies() -> dict[str, Strategy[Any]]:
    """Return the strategies to compare, by name."""
    return {
        "bsp": BSP(),
        "osp": OSP(),
        "osp, 0.8 late": OSP(budget=0.8),
        "osp, 0.8 late, no correction": OSP(budget=0.8, correction="none"),
        "ssd_sgd": SSDSGD(),
        "ssd_sgd, no warm-up": SSDSGD(warmup=0),
        "ssd_sgd, warm-up 100": SSDSGD(warmup=100),
        "ssd_sgd, warm-up 500": SSDSGD(warmup=500),
        "ssd_sgd, pulled at once": SSDSGD(staggered=False),
        "ssd_sgd, server": SSDSGD(on="server"),
        "ssd_sgd, authors": SSDSGD(rule="authors", warmup=100),
        "ssd_sgd, authors, alpha 2": SSDSGD(rule="authors", warmup=100, alpha=2.0),
        "ssd_sgd, authors, alpha 1": SSDSGD(rule="authors", warmup=100, alpha=1.0),
    }


def balanced_cluster() -> Cluster:
    """Return a cluster on which a ring all-reduce takes as long as a step's computation (K = C)."""
    bits_per_s = 8 * NBYTES * 2 * (WORKERS - 1) / WORKERS / STEP_S
    workers = Workers(count=WORKERS, step_s=STEP_S, up_bits_per_s=bits_per_s, down_bits_per_s=bits_per_s)
    return Cluster(workers=(workers,))


def accuracy(name: str, seed: int, folder: Path) -> float:
    """Train with a strategy and a seed; return the final test accuracy."""
    torch.set_num_threads(1)
    task = FashionMnist(model="mlp", batch_size=32)
    job = Job(task=task, strategy=strategies()[name], workers=WORKERS, seed=seed, steps=STEPS, work="equal")
    return simulate(job, balanced_cluster(), task.load(folder))[-1].value


def accuracies(names: list[str], folder: Path) -> Iterator[float]:
    """Train every strategy with every seed, one process per core; yield the accuracies in order."""
    pairs = [(name, seed) for name in names for seed in SEEDS]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(accuracy, *zip(*pairs, strict=True), [folder] * len(pairs))


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("overlap_accuracy", __doc__)
    add_data_option(parser)
    parser.add_argument("--only", nargs="+", choices=list(strategies()), help="only BSP and these")
    options = parser.parse_args(arguments)
    folder = require_data(parser, options)
    table = Table("overlap_accuracy", __doc__ or "", ["strategy", "accuracy, %", "minus BSP", "goal"])
    names = ["bsp", *options.only] if options.only else list(strategies())
    found = accuracies(names, folder)
    base = 0.0
    for name in names:
        values = [next(found) for _ in SEEDS]
        mean = statistics.mean(values)
        base = base or mean
        table.row(name, spread(values, 2, 100), f"{100 * (mean - base):+.2f}", "≥ −0.5")
    table.write()
