"""Is Auto never slower than BSP, nor less accurate?

    python -m benchmarks run auto --data FOLDER [--tasks digits,fashion-mnist,mnist] [--seeds 101,102,103]

Four workers in virtual time: three tasks, links of 1 Gbit/s, 200 and 50 Mbit/s, equal workers and one that is
4x slower. Auto has its defaults, BSP and LocalSGD(8), the longest period that Auto takes, are the two fixed
ones that it is to choose from. Seconds are those to the target, between evaluations; accuracy is that of the
last evaluation, after equally many steps for all. All are means over seeds, on which no setting was chosen.

Goals: at most 1.02 of BSP's seconds to the target, and at most 0.3 points less accurate, in every case.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.support.options import add_data_option, benchmark_parser, require_data
from benchmarks.support.tables import Table
from offbeat import BSP, Auto, LocalSGD, Strategy
from offbeat.core.ledger import Ledger
from offbeat.core.units import parse_rate
from offbeat.experiments.job import Job
from offbeat.experiments.planner.trials import Trial, attempt
from offbeat.experiments.tasks import Data, task
from offbeat.worlds.virtual.cluster import Cluster, Workers

WORKERS = 4
SLOWER, LOST_POINTS = 1.02, 0.3  # the goals
RATES = ("1gbit", "200mbit", "50mbit")
STRAGGLERS = {"equal": 1.0, "one 4x slower": 4.0}
STRATEGIES: dict[str, Strategy[Any]] = {"BSP": BSP(), "LocalSGD(8)": LocalSGD(period=8), "Auto": Auto()}


@dataclass(frozen=True)
class Subject:
    """A task, its target, and the seconds that a step takes."""

    target: float
    step_s: float
    steps: int
    settings: dict[str, Any] = field(default_factory=dict)


TASKS = {  # at 1 Gbit/s, 200 and 50 Mbit/s an exchange takes 0.2, 1 and 4 steps; of the other two 0.8, 4, 16
    "digits": Subject(0.95, 0.010, 220),
    "fashion-mnist": Subject(0.78, 0.040, 200, {"model": "mlp"}),
    "mnist": Subject(0.90, 0.040, 200, {"model": "mlp"}),
}


@dataclass
class Runs:
    """The runs of one strategy in one case, a seed each."""

    trials: list[Trial] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)  # of the first seed

    @property
    def seconds(self) -> float:
        """Seconds to the target; infinite if a seed did not reach it."""
        reached = [trial.reached for trial in self.trials]
        return statistics.mean(point.seconds if point else math.inf for point in reached)

    @property
    def step_s(self) -> float:
        return statistics.mean(trial.seconds / trial.history[-1].step for trial in self.trials)

    @property
    def accuracy(self) -> float:
        return 100 * statistics.mean(trial.value or 0.0 for trial in self.trials)


def cluster(step_s: float, rate: str, slower: float) -> Cluster:
    bits_per_s = parse_rate(rate)
    times = [step_s] * (WORKERS - 1) + [slower * step_s]
    link = {"up_bits_per_s": bits_per_s, "down_bits_per_s": bits_per_s, "latency_s": 1e-4}
    return Cluster(workers=tuple(Workers(step_s=s, **link) for s in times))


def run(
    name: str, strategy: Strategy[Any], on: Cluster, data: Data, seeds: Sequence[int], steps: int | None
) -> Runs:
    """Train a task with a strategy on a cluster, once for each seed."""
    subject, runs = TASKS[name], Runs()
    for seed in seeds:
        ledgers: list[Ledger] = []

        def watch(of_run: list[Ledger], ledgers: list[Ledger] = ledgers) -> Sequence[Any]:
            ledgers.extend(of_run)
            return ()

        job = Job(
            task=task(name, **subject.settings),
            strategy=strategy,
            workers=WORKERS,
            seed=seed,
            steps=steps or subject.steps,
            evaluate_every=10,
            target=subject.target,
        )
        runs.trials.append(attempt(job, on, data, math.inf, True, watch, "cpu", None))
        if not runs.changes:
            runs.changes = [text.partition(" instead")[0] for _, _, _, text in ledgers[0].events]
    return runs


def compare(table: Table, name: str, data: Data, seeds: Sequence[int], steps: int | None) -> list[bool]:
    """Run all cases of a task; return whether Auto keeps the goals in each."""
    kept = []
    for rate, workers in itertools.product(RATES, STRAGGLERS):
        on = cluster(TASKS[name].step_s, rate, STRAGGLERS[workers])
        runs = {label: run(name, each, on, data, seeds, steps) for label, each in STRATEGIES.items()}
        bsp, fixed, auto = runs.values()
        best = min(bsp.seconds, fixed.seconds)
        lost = bsp.accuracy - auto.accuracy
        kept.append(auto.seconds <= SLOWER * bsp.seconds and lost <= LOST_POINTS)
        table.row(
            f"{name}, {rate}, {workers}",
            *(f"{each.seconds:.2f}" for each in runs.values()),
            f"{auto.seconds / bsp.seconds:.3f}",
            f"{auto.seconds / best:.3f}",
            f"{auto.step_s / bsp.step_s:.3f}",
            *(f"{each.accuracy:.2f}" for each in runs.values()),
            f"{-lost:+.2f}",
            ", ".join(auto.changes) or "stays BSP",
            "yes" if kept[-1] else "**no**",
        )
    return kept


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("auto", __doc__)
    add_data_option(parser)
    parser.add_argument("--tasks", default=",".join(TASKS), help="tasks to train")
    parser.add_argument("--seeds", default="101,102,103")
    parser.add_argument("--steps", type=int, help="instead of the task's own")
    options = parser.parse_args(arguments)
    folder: Path = require_data(parser, options)
    torch.set_num_threads(1)
    names, seeds = options.tasks.split(","), [int(seed) for seed in options.seeds.split(",")]
    columns = [
        "case",
        *(f"{label}, s" for label in STRATEGIES),
        *("Auto / BSP", "Auto / best fixed", "a step, Auto / BSP"),
        *(f"{label}, %" for label in STRATEGIES),
        *("Auto − BSP, points", "Auto's changes", "goals kept"),
    ]
    table = Table("auto", __doc__ or "", columns, variant="" if set(names) == set(TASKS) else "-".join(names))
    kept = [
        each
        for name in names
        for each in compare(
            table, name, task(name, **TASKS[name].settings).load(folder), seeds, options.steps
        )
    ]
    table.note(f"seeds {', '.join(map(str, seeds))}")
    table.note(f"goals kept: {sum(kept)} of {len(kept)} cases")
    table.write()
