"""Under Adam, does SelSync lose because a mean of the workers' own steps is short?

    python -m benchmarks run selsync_adam [--choose 30 31 32] [--decide 33 34 35 36 37 38] [--epochs 10]

SelSync averages weights after each worker's own Adam step (PA), or gradients before it (GA; with δ 0 that is
BSP, bit for bit). The digits with an MLP (64, 48, 32, 10), 8 workers in virtual time, batches of 16, a
constant rate. A strategy's own rate is the power of two times 0.001 with the highest mean accuracy over the
seeds `--choose`. Accuracies are of the published model after the last step: means over the seeds `--decide`,
lowest and highest. "path" is the sum of the lengths of worker 0's steps at BSP's rate, local ones too, of
BSP's.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from benchmarks.strategies.pushes import SmallDigits
from benchmarks.support.options import benchmark_parser
from benchmarks.support.tables import Table, spread
from offbeat import BSP, SelSync, Strategy
from offbeat.core.ledger import Ledger
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback, Worker
from offbeat.experiments.virtual_run import simulate
from offbeat.worlds.virtual.cluster import load_cluster

WORKERS, EPOCHS = 8, 10
FACTORS = (0.25, 0.5, 1, 2, 4)  # times BSP's rate
RATES: tuple[float, ...] = tuple(0.001 * 2**power for power in range(8))
STRATEGIES: dict[str, Strategy[Any]] = {
    "BSP": BSP(),
    "PA, δ 0": SelSync(delta=0.0),
    "PA, δ 0.1": SelSync(delta=0.1),
    "PA, δ 0.3": SelSync(delta=0.3),
    "GA, δ 0.1": SelSync(delta=0.1, aggregate="gradients"),
    "GA, δ 0.3": SelSync(delta=0.3, aggregate="gradients"),
}


@dataclass(frozen=True)
class Outcome:
    """What one run came to."""

    accuracy: float  # of the published model, in percent
    lssr: float
    path: float


class Path(Callback):
    """Sum of the lengths of worker 0's steps."""

    def __init__(self) -> None:
        self.length = 0.0
        self._last: Tensor | None = None

    def stepped(self, step: int, loss: Tensor, worker: Worker) -> None:
        now = parameters_to_vector(worker.model.parameters()).detach().clone()
        if self._last is not None:
            self.length += float((now - self._last).norm())
        self._last = now


def train(strategy: Strategy[Any], lr: float, seed: int, epochs: int) -> Outcome:
    """Train once."""
    task = SmallDigits(kind="adam", lr=lr)
    data = task.load()
    job = Job(task=task, strategy=strategy, workers=WORKERS, seed=seed, epochs=epochs, work="equal")
    job = replace(job, evaluate_every=job.total_steps(len(data)))
    path, ledgers = Path(), list[Ledger]()

    def callbacks(of_workers: list[Ledger]) -> list[Callback]:
        ledgers.extend(of_workers)
        return [path]

    last = simulate(job, load_cluster("lan-1g"), data, callbacks)[-1]
    return Outcome(100 * last.value, ledgers[0].totals().lssr, path.length)


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("selsync_adam", __doc__)
    parser.add_argument(
        "--choose", type=int, nargs="+", default=[30, 31, 32], help="seeds that choose a rate"
    )
    parser.add_argument("--decide", type=int, nargs="+", default=[33, 34, 35, 36, 37, 38], help="other seeds")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--only", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)

    def runs(name: str, rate: float, seeds: Sequence[int]) -> list[Outcome]:
        return [train(STRATEGIES[name], rate, seed, options.epochs) for seed in seeds]

    def best_rate(name: str) -> float:
        return max(RATES, key=lambda rate: mean(runs(name, rate, options.choose), "accuracy"))

    at_bsp = best_rate("BSP")
    bsp_path = mean(runs("BSP", at_bsp, options.decide), "path")
    columns = [f"at {factor:g}x BSP's rate" for factor in FACTORS]
    columns = ["strategy", "LSSR", "path", *columns, "own rate", "at its own"]
    variant = "" if options.epochs == EPOCHS else f"{options.epochs}-epochs"
    table = Table("selsync_adam", __doc__ or "", columns, variant)
    table.note(f"{options.epochs} epochs; BSP's rate: {at_bsp:g}; {len(options.decide)} seeds decide")
    for name in options.only:
        own = best_rate(name)
        found = {f: runs(name, f * at_bsp, options.decide) for f in FACTORS}
        mine = found[own / at_bsp] if own / at_bsp in found else runs(name, own, options.decide)
        table.row(
            name,
            f"{mean(found[1], 'lssr'):.2f}",
            f"{mean(found[1], 'path') / bsp_path:.2f}",
            *(spread([run.accuracy for run in of], 1) for of in found.values()),
            f"{own:g}",
            spread([run.accuracy for run in mine], 1),
        )
    table.write()


def mean(outcomes: Sequence[Outcome], field: str) -> float:
    """Return the mean of a field over runs."""
    return statistics.mean(float(getattr(outcome, field)) for outcome in outcomes)
