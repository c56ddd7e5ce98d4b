"""Are OSP and SSD-SGD as accurate as BSP?

    python -m benchmarks run overlap_accuracy --data FOLDER [--sgd 0.02 0.05 0.1] [--adamw 0.001]
    python -m benchmarks run overlap_accuracy --of digits-cnn --sgd 0.05 0.1 --seeds 6 7 8 --only

Fashion-MNIST's MLP, four workers of 32 samples, two epochs (936 steps), or with `--of` the digits, eight
workers of 16 samples, 20 epochs (220 steps), all at constant learning rates: with momentum 0.9 (`--sgd`;
Fashion-MNIST's own rate is 0.02) and with AdamW. In virtual time, on a network where an all-reduce takes as
long as a step's computation: the case for overlapping strategies. The table has the final test accuracy (mean
of the seeds, lowest and highest), and its difference from BSP's, seed by seed. Goal: at most 0.3 points below
in the mean. The second command compares rates for BSP alone; use other seeds for it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.papers.runs import with_optimizer
from benchmarks.support.options import add_data_option, benchmark_parser, require_data
from benchmarks.support.tables import Table, spread
from offbeat import BSP, OSP, SSDSGD, Strategy
from offbeat.experiments.job import Job
from offbeat.experiments.tasks import Task, task
from offbeat.experiments.virtual_run import simulate
from offbeat.worlds.virtual.cluster import Cluster, Workers

STEP_S = 0.05


class Setup(NamedTuple):
    """What is trained, and for how long."""

    task: str
    model: str
    workers: int
    batch_size: int
    steps: int

    def build(self, optimizer: str, lr: float) -> Task:
        """Build the task with an optimizer, "SGD" or "AdamW"."""
        built = task(self.task, model=self.model, batch_size=self.batch_size, lr=lr)
        return built if optimizer == "SGD" else with_optimizer(built, optimizer.lower())


SETUPS = {
    "fashion-mnist": Setup("fashion-mnist", "mlp", 4, 32, 936),
    "digits-cnn": Setup("digits", "cnn", 8, 16, 220),
    "digits-mlp": Setup("digits", "mlp", 8, 16, 220),
}
USUAL = "fashion-mnist"


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


def balanced_cluster(model: nn.Module, workers: int) -> Cluster:
    """Return a cluster on which a ring all-reduce takes as long as a step's computation (K = C)."""
    nbytes = 4 * sum(param.numel() for param in model.parameters())
    rate = nbytes * 2 * (workers - 1) / workers / STEP_S * 8
    return Cluster(workers=(Workers(count=workers, step_s=STEP_S, up_bits_per_s=rate, down_bits_per_s=rate),))


class Training(NamedTuple):
    """One training: what, strategy, optimizer and learning rate, seed."""

    of: str
    strategy: str
    optimizer: str
    lr: float
    seed: int

    def accuracy(self, folder: Path | None) -> float:
        """Train; return the final test accuracy."""
        torch.set_num_threads(1)
        setup = SETUPS[self.of]
        what = setup.build(self.optimizer, self.lr)
        job = Job(
            task=what,
            strategy=strategies()[self.strategy],
            workers=setup.workers,
            seed=self.seed,
            steps=setup.steps,
            work="equal",
        )
        return simulate(job, balanced_cluster(what.build(), setup.workers), what.load(folder))[-1].value


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("overlap_accuracy", __doc__)
    add_data_option(parser)
    parser.add_argument("--of", choices=list(SETUPS), default=USUAL, help="what is trained")
    parser.add_argument("--only", nargs="*", choices=list(strategies()), help="only BSP and these")
    parser.add_argument("--sgd", type=float, nargs="*", default=[0.02], help="rates of SGD with momentum")
    parser.add_argument("--adamw", type=float, nargs="*", default=[], help="rates of AdamW")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args(arguments)
    folder = require_data(parser, options) if options.of == USUAL else None
    columns = ["optimizer", "rate", "strategy", "accuracy, %", "minus BSP", "goal"]
    variant = options.of if options.of != USUAL else ""
    if options.only == []:
        variant = f"{options.of}-rates"
    table = Table("overlap_accuracy", __doc__ or "", columns, variant)
    names = list(strategies()) if options.only is None else ["bsp", *options.only]
    rates = [*(("SGD", lr) for lr in options.sgd), *(("AdamW", lr) for lr in options.adamw)]
    trainings = [
        Training(options.of, name, *rate, seed) for rate in rates for name in names for seed in options.seeds
    ]
    with ProcessPoolExecutor(os.cpu_count()) as pool:  # yields in order
        found = pool.map(Training.accuracy, trainings, [folder] * len(trainings))
        for optimizer, lr in rates:
            bsp: list[float] = []
            for name in names:
                values = [next(found) for _ in options.seeds]
                bsp = bsp or values
                minus = spread([a - b for a, b in zip(values, bsp, strict=True)], 2, 100)
                goal = "≥ −0.3" if name != "bsp" else ""
                table.row(optimizer, f"{lr:g}", name, spread(values, 2, 100), minus if goal else "", goal)
    table.write()
