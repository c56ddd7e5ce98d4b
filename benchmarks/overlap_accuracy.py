"""Do OSP and SSD-SGD train as well as BSP?

    python -m benchmarks.overlap_accuracy --data DIR

Fashion-MNIST, the MLP, 4 workers of 32 samples, two epochs (936 steps) at the task's own learning rate and
momentum (0.02, 0.9), 3 seeds, in virtual time on a network on which an all-reduce takes as long as a step's
computing: what the overlapping strategies are for. Accuracy on the test images in the end: the mean over the
seeds, lowest and highest; and how far that mean lies above BSP's. Goal: at most half a point below.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.osp_ablation import spread
from benchmarks.tables import Table
from offbeat import BSP, OSP, SSDSGD, Strategy
from offbeat.experiments.loop import Job
from offbeat.experiments.tasks.mnist import FashionMnist
from offbeat.experiments.virtual_run import simulate
from offbeat.worlds.virtual.cluster import Cluster, Workers

SEEDS = (0, 1, 2)
STEPS = 936
WORKERS = 4
STEP_S = 0.05
NBYTES = 4 * 669_706  # of the MLP


def strategies() -> dict[str, Strategy[Any]]:
    return {
        "bsp": BSP(),
        "osp": OSP(),
        "osp, 0.8 late": OSP(budget=0.8),
        "osp, 0.8 late, no correction": OSP(budget=0.8, correction="none"),
        "ssd_sgd": SSDSGD(warmup=100),
        "ssd_sgd, pulled at once": SSDSGD(warmup=100, staggered=False),
        "ssd_sgd, alpha 2": SSDSGD(warmup=100, alpha=2.0),
        "ssd_sgd, alpha 1": SSDSGD(warmup=100, alpha=1.0),
        "ssd_sgd, alpha 5, beta 0": SSDSGD(warmup=100, alpha=5.0, beta=0.0),
    }


def as_long_as_computing() -> Cluster:
    """K = C, for a ring of these workers."""
    bits_per_s = 8 * NBYTES * 2 * (WORKERS - 1) / WORKERS / STEP_S
    workers = Workers(count=WORKERS, step_s=STEP_S, up_bits_per_s=bits_per_s, down_bits_per_s=bits_per_s)
    return Cluster(workers=(workers,))


def accuracy(name: str, seed: int, folder: str) -> float:
    torch.set_num_threads(1)
    task = FashionMnist(model="mlp", batch_size=32)
    job = Job(task=task, strategy=strategies()[name], workers=WORKERS, seed=seed, steps=STEPS)
    return simulate(job, as_long_as_computing(), task.load(Path(folder)))[-1].value


def all_of(names: list[str], folder: str) -> Iterator[float]:
    pairs = [(name, seed) for name in names for seed in SEEDS]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(accuracy, *zip(*pairs, strict=True), [folder] * len(pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", default=os.environ.get("OFFBEAT_DATA"))
    parser.add_argument("--only", nargs="+", choices=list(strategies()), help="BSP, and these")
    options = parser.parse_args()
    if not options.data:
        parser.error("the Fashion-MNIST files are needed: give --data DIR, or set OFFBEAT_DATA")
    table = Table("overlap-accuracy", __doc__ or "", ["strategy", "accuracy, %", "against BSP", "goal"])
    names = ["bsp", *options.only] if options.only else list(strategies())
    found = all_of(names, options.data)
    base = 0.0
    for name in names:
        values = [next(found) for _ in SEEDS]
        mean = statistics.mean(values)
        base = base or mean
        table.row(name, spread(values, 2, 100), f"{100 * (mean - base):+.2f}", "≥ −0.5")
    table.write()


if __name__ == "__main__":
    main()
