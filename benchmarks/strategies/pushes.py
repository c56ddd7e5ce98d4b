"""Should workers push updates or gradients, under which optimizer? And what does GDTopK cost in accuracy?

    python -m benchmarks run pushes [--epochs 10] [--seeds 20 21 22] [--optimizers adam] [--only STRATEGY …]

The digits with an MLP (64, 48, 32, 10), 16 workers in virtual time on paper-gssp (groups of 4 whose steps
take 1, 1.5, 2 and 4 times as long) with one server, batches of 16, equal work. Test accuracy after the last
step: the mean over seeds that were not used to choose any setting, lowest and highest. "best" is the best of
the means over rates: each way of pushing at the learning rate that suits it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from benchmarks.support.options import benchmark_parser
from benchmarks.support.tables import Table, spread
from offbeat import BSP, GSSP, SSP, GDTopK, Strategy
from offbeat.experiments.job import Job
from offbeat.experiments.tasks.digits import Digits
from offbeat.experiments.virtual_run import simulate
from offbeat.worlds.virtual.cluster import ServerMachines, load_cluster

RATES = {"adam": (0.001, 0.004, 0.016), "momentum": (0.03, 0.1)}
WIDE = ServerMachines(up_bits_per_s=16e9, down_bits_per_s=16e9)
GDTOPK: dict[str, GDTopK] = {
    "GDTopK": GDTopK(),
    "GDTopK, floor=0": GDTopK(floor=0.0),
}


def strategies() -> dict[str, Strategy[Any]]:
    """Return the strategies to compare, by name."""
    found: dict[str, Strategy[Any]] = {"BSP": BSP()}
    for push in ("update", "gradient"):
        found[f"SSP(0), {push}"] = SSP(staleness=0, push=push)
        found[f"SSP(3), {push}"] = SSP(push=push)
        found[f"GSSP, {push}"] = GSSP(push=push)
        found |= {f"{name}, {push}": GSSP(push=push, sparse=sparse) for name, sparse in GDTOPK.items()}
    return found


@dataclass(frozen=True, kw_only=True)
class SmallDigits(Digits):
    """The digits, by an MLP, with either optimizer."""

    kind: str = "adam"

    def build(self) -> nn.Module:
        layers = [nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 10)]
        return nn.Sequential(nn.Flatten(), *layers)

    def optimizer(self, model: nn.Module) -> Optimizer:
        if self.kind == "adam":
            return Adam(model.parameters(), lr=self.lr)
        return SGD(model.parameters(), lr=self.lr, momentum=0.9)


def accuracy(strategy: Strategy[Any], kind: str, lr: float, seed: int, epochs: int) -> float:
    """Train once; return the test accuracy in percent."""
    task = SmallDigits(kind=kind, lr=lr)
    data = task.load()
    job = Job(task=task, strategy=strategy, workers=16, seed=seed, epochs=epochs, work="equal")
    job = replace(job, evaluate_every=job.total_steps(len(data)))
    return 100 * simulate(job, replace(load_cluster("paper-gssp"), server=WIDE), data)[-1].value


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("pushes", __doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, nargs="+", default=[20, 21, 22])
    parser.add_argument("--optimizers", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--only", nargs="+", choices=list(strategies()), default=list(strategies()))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rates = [f"{kind}, {rate}" for kind in options.optimizers for rate in RATES[kind]]
    columns = ["strategy", *rates, *(f"{kind}, best" for kind in options.optimizers)]
    table = Table("pushes", __doc__ or "", columns, "" if options.only == list(strategies()) else "some")
    for name in options.only:
        cells, best = [], []
        for kind in options.optimizers:
            runs = [
                [accuracy(strategies()[name], kind, rate, seed, options.epochs) for seed in options.seeds]
                for rate in RATES[kind]
            ]
            cells += [spread(values, 1) for values in runs]
            best.append(f"{max(statistics.mean(values) for values in runs):.1f}")
        table.row(name, *cells, *best)
    table.write()
