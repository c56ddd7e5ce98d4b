"""Which parts of SelSync help: averaging weights or gradients, going round all chunks, deciding late?

    python -m benchmarks.selsync_ablation --data FOLDER

A quarter of `fashion-mnist` (15,000 samples; mlp, batches of 32), 4 virtual workers on lan-1g, three seeds a
row, 470 steps: under SelDP every worker goes once round the ring of 4 chunks. Skewed: a chunk holds 3 of the
10 classes. Accuracy is of the mean of all workers' weights, on the whole test split, after the last step:
mean of the seeds, and least to most.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.tables import Table
from offbeat import BSP, SelSync, Strategy
from offbeat.core.ledger import Ledger, WorkerTotals
from offbeat.experiments.loop import Callback, Job
from offbeat.experiments.tasks import Data
from offbeat.experiments.tasks.images import Images
from offbeat.experiments.tasks.mnist import FashionMnist
from offbeat.experiments.virtual_run import simulate
from offbeat.worlds.virtual.cluster import load_cluster

SAMPLES = 15_000
STEPS = 470
SEEDS = (0, 1, 2)
WORKERS = 4


class Run(NamedTuple):
    question: str
    name: str
    strategy: Strategy[Any]
    data: dict[str, Any]  # order, skew, inject of the job


PA = SelSync(delta=0.1)
SKEWED = {"skew": 3}
RUNS = [
    Run("reference", "BSP", BSP(), {}),
    Run("PA or GA", "PA", PA, {"order": "seldp"}),
    Run("PA or GA", "GA", SelSync(delta=0.1, aggregate="gradients"), {"order": "seldp"}),
    Run("late", "PA, late", SelSync(delta=0.1, late=True), {"order": "seldp"}),
    Run("IID", "PA, DefDP", PA, {"order": "defdp"}),
    Run("skewed", "BSP, DefDP", BSP(), {"order": "defdp", **SKEWED}),
    Run("skewed", "PA, DefDP", PA, {"order": "defdp", **SKEWED}),
    Run("skewed", "PA, SelDP", PA, {"order": "seldp", **SKEWED}),
    Run("skewed", "PA, DefDP, injection 0.5, 0.5", PA, {"order": "defdp", **SKEWED, "inject": (0.5, 0.5)}),
]


def outcome(run: Run, seed: int, data: Data) -> tuple[float, float, WorkerTotals]:
    """Accuracy, virtual seconds and the totals of worker 0."""
    ledgers: list[Ledger] = []

    def watchers(books: list[Ledger]) -> list[Callback]:
        ledgers.extend(books)
        return []

    job = Job(
        task=FashionMnist(model="mlp"),
        strategy=run.strategy,
        workers=WORKERS,
        seed=seed,
        steps=STEPS,
        evaluate_every=STEPS,
        **run.data,
    )
    last = simulate(job, load_cluster("lan-1g"), data, watchers)[-1]
    return last.value, last.seconds, ledgers[0].totals()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder of the data sets; default: OFFBEAT_DATA")
    options = parser.parse_args()
    torch.set_num_threads(1)
    whole = FashionMnist().load(options.data)
    inputs, labels = whole.train
    data = Images((inputs[:SAMPLES], labels[:SAMPLES]), whole.test)
    table = Table(
        "selsync-ablation",
        __doc__ or "",
        ["question", "run", "accuracy", "least – most", "LSSR", "MB a worker", "virtual s"],
    )
    table.note("SelSync with delta=0.1 and its other defaults: window 25, smoothing 4/100.")
    for run in RUNS:
        found = [outcome(run, seed, data) for seed in SEEDS]
        values = [value for value, _, _ in found]
        entries = [entry for _, _, entry in found]
        table.row(
            run.question,
            run.name,
            f"{statistics.mean(values):.4f}",
            f"{min(values):.4f} – {max(values):.4f}",
            f"{statistics.mean(entry.lssr for entry in entries):.3f}",
            f"{statistics.mean(entry.bytes_sent for entry in entries) / 1e6:.0f}",
            f"{statistics.mean(seconds for _, seconds, _ in found):.1f}",
        )
    table.write()


if __name__ == "__main__":
    main()
