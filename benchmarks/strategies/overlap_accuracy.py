"""Are OSP and SSD-SGD as accurate as BSP?

    python -m benchmarks run overlap_accuracy --data FOLDER [--sgd 0.02 0.05 0.1] [--adamw 0.001]

Fashion-MNIST's MLP, four workers of 32 samples, two epochs (936 steps) at constant learning rates: with
momentum 0.9 (`--sgd`; the task's own rate is 0.02) and with AdamW. Three seeds, in virtual time, on a network
where an all-reduce takes as long as a step's computation: the case for overlapping strategies. The table has
the final test accuracy (mean of the seeds, lowest and highest), and its difference from BSP's, seed by seed.
Goal: at most 0.3 points below in the mean.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

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


@dataclass(frozen=True, kw_only=True)
class WithAdamW(FashionMnist):
    """The task with AdamW in the place of SGD."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.lr)


TASKS: dict[str, type[FashionMnist]] = {"SGD": FashionMnist, "AdamW": WithAdamW}


class Training(NamedTuple):
    """One training: strategy, optimizer and learning rate, seed."""

    strategy: str
    optimizer: str
    lr: float
    seed: int

    def accuracy(self, folder: Path) -> float:
        """Train; return the final test accuracy."""
        torch.set_num_threads(1)
        task = TASKS[self.optimizer](model="mlp", batch_size=32, lr=self.lr)
        strategy = strategies()[self.strategy]
        job = Job(task=task, strategy=strategy, workers=WORKERS, seed=self.seed, steps=STEPS, work="equal")
        return simulate(job, balanced_cluster(), task.load(folder))[-1].value


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("overlap_accuracy", __doc__)
    add_data_option(parser)
    parser.add_argument("--only", nargs="+", choices=list(strategies()), help="only BSP and these")
    parser.add_argument("--sgd", type=float, nargs="*", default=[0.02], help="rates of SGD with momentum")
    parser.add_argument("--adamw", type=float, nargs="*", default=[], help="rates of AdamW")
    options = parser.parse_args(arguments)
    folder = require_data(parser, options)
    columns = ["optimizer", "rate", "strategy", "accuracy, %", "minus BSP", "goal"]
    table = Table("overlap_accuracy", __doc__ or "", columns)
    names = ["bsp", *options.only] if options.only else list(strategies())
    rates = [*(("SGD", lr) for lr in options.sgd), *(("AdamW", lr) for lr in options.adamw)]
    trainings = [Training(name, *rate, seed) for rate in rates for name in names for seed in SEEDS]
    with ProcessPoolExecutor(os.cpu_count()) as pool:  # yields in order
        found = pool.map(Training.accuracy, trainings, [folder] * len(trainings))
        for optimizer, lr in rates:
            bsp: list[float] = []
            for name in names:
                values = [next(found) for _ in SEEDS]
                bsp = bsp or values
                minus = spread([a - b for a, b in zip(values, bsp, strict=True)], 2, 100)
                goal = "≥ −0.3" if name != "bsp" else ""
                table.row(optimizer, f"{lr:g}", name, spread(values, 2, 100), minus if goal else "", goal)
    table.write()
