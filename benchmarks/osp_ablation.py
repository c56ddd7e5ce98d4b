"""What is OSP's correction worth?

    python -m benchmarks.osp_ablation --data DIR

Fashion-MNIST, the MLP, 4 workers, virtual time on lan-1g; 200 steps of 32 samples a worker, 3 seeds. OSP lets
up to 0.8 of the bytes come a step late (growth over 20 steps), and predicts them meanwhile: with the local
gradient (lgp), with a mix of that and a running mean (ema-lgp), or not at all (none). Staleness matters where
steps are long, so learning rates go up to 25 times the task's own, 0.02. Loss is worker 0's mean over the
last 100 steps, accuracy that of the test images in the end: the mean over the seeds, lowest and highest.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.tables import Table
from offbeat import BSP, OSP, Strategy
from offbeat.experiments.loop import Job
from offbeat.experiments.tasks.mnist import FashionMnist
from offbeat.experiments.virtual_run import simulate
from offbeat.worlds.virtual.cluster import load_cluster

SEEDS = (0, 1, 2)
STEPS = 200
OPTIMIZERS = ((0.02, 0.9), (0.1, 0.9), (0.5, 0.0))  # learning rate, momentum


def strategies() -> dict[str, Strategy[Any]]:
    late = {
        correction: OSP(budget=0.8, growth=20, correction=correction)
        for correction in ("lgp", "ema-lgp", "none")
    }
    return {"bsp": BSP(), **{f"osp, {name}": strategy for name, strategy in late.items()}}


@dataclass(frozen=True, kw_only=True)
class Fashion(FashionMnist):
    momentum: float = 0.9

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=self.momentum)


def spread(values: Sequence[float], digits: int, scale: float = 1.0) -> str:
    low, mean, high = (scale * v for v in (min(values), statistics.mean(values), max(values)))
    return f"{mean:.{digits}f} ({low:.{digits}f} – {high:.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=os.environ.get("OFFBEAT_DATA"))
    options = parser.parse_args()
    if not options.data:
        parser.error("the Fashion-MNIST files are needed: give --data DIR, or set OFFBEAT_DATA")
    torch.set_num_threads(1)
    data = FashionMnist().load(Path(options.data))
    cluster = load_cluster("lan-1g")
    columns = ["learning rate", "momentum", "strategy", "loss", "accuracy, %", "virtual ms a step"]
    table = Table("osp-ablation", __doc__ or "", columns)
    for lr, momentum in OPTIMIZERS:
        for name, strategy in strategies().items():
            ends = []
            for seed in SEEDS:
                task = Fashion(model="mlp", lr=lr, momentum=momentum)
                job = Job(
                    task=task, strategy=strategy, workers=4, seed=seed, steps=STEPS, evaluate_every=STEPS // 2
                )
                ends.append(simulate(job, cluster, data)[-1])
            table.row(
                f"{lr:g}",
                f"{momentum:g}",
                name,
                spread([end.loss for end in ends], 3),
                spread([end.value for end in ends], 1, 100),
                f"{1e3 * statistics.mean(end.seconds for end in ends) / STEPS:.1f}",
            )
    table.write()


if __name__ == "__main__":
    main()
