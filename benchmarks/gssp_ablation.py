"""What do groups give, and what does GDTopK cost? Which direction of its ratios is better?

    python -m benchmarks.gssp_ablation --data DIR

Fashion-MNIST, the MLP, 16 workers in virtual time on paper-gssp (groups of 4 that take 1, 1.5, 2 and 4 times
as long a step), 3 seeds. Every worker makes the same steps of 32 samples, in six of GDTopK's epochs, so that
its whole table is passed through. Samples a second: each worker's own rate until it has done its steps,
added up (goal: 2.2 times BSP's, 1.46 times SSP's; 2.42 of BSP's without noise is the limit, the sum of all
speeds). Bytes: what left all NICs (goal: half of GSSP's). Accuracy: of the test images, once all have done
their steps (goal: within a point of BSP's; GDTopK's no worse than GSSP's). Means over the seeds, lowest and
highest.
"""

from __future__ import annotations

import argparse
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.osp_ablation import spread
from benchmarks.tables import Table
from offbeat import BSP, GSSP, SSP, GDTopK, Strategy
from offbeat.core.ledger import Ledger
from offbeat.experiments.loop import Job
from offbeat.experiments.tasks.mnist import FashionMnist
from offbeat.experiments.virtual_run import simulate
from offbeat.worlds.virtual.cluster import load_cluster

SEEDS = (0, 1, 2)
WORKERS = 16
EPOCHS = 6
CLUSTER = "paper-gssp"


def strategies(steps: int) -> dict[str, Strategy[Any]]:
    epoch = max(2, steps // EPOCHS)
    return {
        "bsp": BSP(),
        "ssp(3)": SSP(),
        "gssp": GSSP(),
        "gdtopk, slow groups send more": GSSP(sparse=GDTopK(epoch_steps=epoch, more="slow")),
        "gdtopk, fast groups send more": GSSP(sparse=GDTopK(epoch_steps=epoch, more="fast")),
    }


class Outcome(NamedTuple):
    accuracy: float
    steps_a_second: float
    nbytes: int
    seconds: float


def outcome(name: str, seed: int, steps: int, data: str) -> Outcome:
    torch.set_num_threads(1)
    task = FashionMnist(model="mlp")
    job = Job(
        task=task,
        strategy=strategies(steps)[name],
        workers=WORKERS,
        seed=seed,
        steps=steps,
        evaluate_every=steps,
    )
    ledgers: list[Ledger] = []

    def watchers(books: list[Ledger]) -> list[Any]:
        ledgers.extend(books)
        return []

    end = simulate(job, load_cluster(CLUSTER), task.load(Path(data)), watchers)[-1]
    rate = sum(ledger.steps / ledger.seconds for ledger in ledgers)
    return Outcome(end.value, rate, sum(ledger.bytes_sent for ledger in ledgers), end.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=os.environ.get("OFFBEAT_DATA"))
    parser.add_argument("--steps", type=int, default=160)
    options = parser.parse_args()
    if not options.data:
        parser.error("the Fashion-MNIST files are needed: give --data DIR, or set OFFBEAT_DATA")
    columns = ["strategy", "accuracy, %", "samples/s to BSP's", "to SSP's", "bytes to GSSP's", "virtual s"]
    table = Table("gssp-ablation", __doc__ or "", columns)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        under_way = {
            name: [pool.submit(outcome, name, seed, options.steps, options.data) for seed in SEEDS]
            for name in strategies(options.steps)
        }
        runs = {name: [future.result() for future in futures] for name, futures in under_way.items()}

    def ratios(name: str, other: str, what: str) -> list[float]:
        pairs = zip(runs[name], runs[other], strict=True)
        return [getattr(one, what) / getattr(reference, what) for one, reference in pairs]

    for name, outcomes in runs.items():
        table.row(
            name,
            spread([run.accuracy for run in outcomes], 1, 100),
            spread(ratios(name, "bsp", "steps_a_second"), 2),
            spread(ratios(name, "ssp(3)", "steps_a_second"), 2),
            spread(ratios(name, "gssp", "nbytes"), 3),
            f"{statistics.mean(run.seconds for run in outcomes):.1f}",
        )
    table.write()


if __name__ == "__main__":
    main()
