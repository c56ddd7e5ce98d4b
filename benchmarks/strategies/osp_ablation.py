"""What does OSP's correction gain?

    python -m benchmarks run osp_ablation --data FOLDER

Fashion-MNIST's MLP, four workers, virtual time on lan-1g; 200 steps of 32 samples per worker, three seeds.
OSP lets up to 0.8 of the bytes arrive one step late (growing over 20 steps) and predicts them meanwhile: from
the local gradient (lgp), from a mix of it and a running mean (ema-lgp), or not at all (none). Staleness
matters when steps are long, so learning rates go up to 25x the task's own, 0.02. Loss is the mean of worker
0 over the last 100 steps, accuracy is the final test accuracy: mean of the seeds, lowest and highest.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.support.options import add_data_option, benchmark_parser, require_data
from benchmarks.support.tables import Table, spread
from offbeat import BSP, OSP, Strategy
from offbeat.experiments.job import Job
from offbeat.experiments.tasks.mnist import FashionMnist
from offbeat.experiments.virtual_run import simulate
from offbeat.worlds.virtual.cluster import load_cluster

SEEDS = (0, 1, 2)
STEPS = 200
OPTIMIZERS = ((0.02, 0.9), (0.1, 0.9), (0.5, 0.0))  # learning rate, momentum


def strategies() -> dict[str, Strategy[Any]]:
    """Return BSP, and OSP with each correction."""
    late = {
        correction: OSP(budget=0.8, growth=20, correction=correction)
        for correction in ("lgp", "ema-lgp", "none")
    }
    return {"bsp": BSP(), **{f"osp, {name}": strategy for name, strategy in late.items()}}


@dataclass(frozen=True, kw_only=True)
class FashionMomentum(FashionMnist):
    """Fashion-MNIST with the optimizer's momentum as a setting."""

    momentum: float = 0.9

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=self.momentum)


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("osp_ablation", __doc__)
    add_data_option(parser)
    folder = require_data(parser, parser.parse_args(arguments))
    torch.set_num_threads(1)
    data = FashionMnist().load(folder)
    cluster = load_cluster("lan-1g")
    columns = ["learning rate", "momentum", "strategy", "loss", "accuracy, %", "virtual ms per step"]
    table = Table("osp_ablation", __doc__ or "", columns)
    for lr, momentum in OPTIMIZERS:
        for name, strategy in strategies().items():
            ends = []
            for seed in SEEDS:
                task = FashionMomentum(model="mlp", lr=lr, momentum=momentum)
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
