"""What do GSSP and GDTopK gain in speed, and cost in accuracy? Which groups should send more?

    python -m benchmarks run gssp_ablation --data FOLDER

Fashion-MNIST's MLP, 16 workers in virtual time on paper-gssp (groups of 4 whose steps take 1, 1.5, 2 and 4
times as long), three seeds. Every worker takes the same number of steps of 32 samples, in six of GDTopK's
epochs, so that its whole table of ratios is used.

Samples per second are each worker's own rate until it is done, added up (goals: 2.2x BSP's, 1.46x SSP's; the
limit is 2.42x BSP's, the sum of all speeds without noise). Bytes are those sent by all workers (goal: half of
GSSP's). Accuracy is the test accuracy after the last step (goals: within a point of BSP's; GDTopK no worse
than GSSP). Means over the seeds, lowest and highest.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.support.options import add_data_option, benchmark_parser, require_data
from benchmarks.support.tables import Table, spread
from offbeat import BSP, GSSP, SSP, GDTopK, Strategy
from offbeat.core.ledger import Ledger
from offbeat.experiments.job import Job
from offbeat.experiments.tasks.mnist import FashionMnist
from offbeat.experiments.virtual_run import simulate
from offbeat.worlds.virtual.cluster import load_cluster

SEEDS = (0, 1, 2)
WORKERS = 16
EPOCHS = 6
CLUSTER = "paper-gssp"


def strategies(steps: int) -> dict[str, Strategy[Any]]:
    """Return the strategies to compare, by name."""
    epoch = max(2, steps // EPOCHS)
    return {
        "bsp": BSP(),
        "ssp(3)": SSP(),
        "gssp": GSSP(),
        "gdtopk, slow groups send more": GSSP(sparse=GDTopK(epoch_steps=epoch, more="slow")),
        "gdtopk, fast groups send more": GSSP(sparse=GDTopK(epoch_steps=epoch, more="fast")),
    }


class Outcome(NamedTuple):
    """Figures of one simulated run."""

    accuracy: float
    steps_per_second: float
    nbytes: int
    seconds: float


def simulate_run(name: str, seed: int, steps: int, data: Path) -> Outcome:
    """Simulate a strategy with one seed."""
    torch.set_num_threads(1)
    task = FashionMnist(model="mlp")
    job = Job(
        task=task,
        strategy=strategies(steps)[name],
        workers=WORKERS,
        seed=seed,
        steps=steps,
        evaluate_every=steps,
        work="equal",
    )
    ledgers: list[Ledger] = []

    def watchers(of_workers: list[Ledger]) -> list[Any]:
        ledgers.extend(of_workers)
        return []

    end = simulate(job, load_cluster(CLUSTER), task.load(data), watchers)[-1]
    rate = sum(ledger.steps / ledger.seconds for ledger in ledgers)
    return Outcome(end.value, rate, sum(ledger.bytes_sent for ledger in ledgers), end.seconds)


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("gssp_ablation", __doc__)
    add_data_option(parser)
    parser.add_argument("--steps", type=int, default=160, help="steps of every worker")
    options = parser.parse_args(arguments)
    folder = require_data(parser, options)
    columns = ["strategy", "accuracy, %", "samples/s / BSP", "samples/s / SSP", "bytes / GSSP", "virtual s"]
    table = Table("gssp_ablation", __doc__ or "", columns)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        pending = {
            name: [pool.submit(simulate_run, name, seed, options.steps, folder) for seed in SEEDS]
            for name in strategies(options.steps)
        }
        runs = {name: [future.result() for future in futures] for name, futures in pending.items()}

    def ratios(name: str, other: str, what: str) -> list[float]:
        pairs = zip(runs[name], runs[other], strict=True)
        return [getattr(one, what) / getattr(reference, what) for one, reference in pairs]

    for name, outcomes in runs.items():
        table.row(
            name,
            spread([run.accuracy for run in outcomes], 1, 100),
            spread(ratios(name, "bsp", "steps_per_second"), 2),
            spread(ratios(name, "ssp(3)", "steps_per_second"), 2),
            spread(ratios(name, "gssp", "nbytes"), 3),
            f"{statistics.mean(run.seconds for run in outcomes):.1f}",
        )
    table.write()
