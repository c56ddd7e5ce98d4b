"""How many workers can virtual time simulate?

    taskset -c 0 python -m benchmarks run scale
    taskset -c 1 python -m benchmarks run scale --part 2/3     # beside 1/3 and 3/3, then --table
    python -m benchmarks run scale --small

100 steps of `quadratic` on one core. Goals, in CPU seconds: under 20 for 10,000 workers of BSP and LocalSGD,
whose cost for each worker and step is at most 1.25 times that of 1,000 workers; under 60 for 1,000 workers
of every other strategy, and no more than that, 600 µs for each worker and step, for 300 workers of SSD-SGD;
under 10 for SSP with 200 workers, 50 steps and stragglers; under 60 for an epoch of `digits` with 64 workers;
under 2 GB of memory for 1,000 workers with a model of 1,000 parameters. Each run is a process of its own.
What torch imports with the first optimizer, a second or more, is not counted. `--only ssp` runs one strategy.
`--out` keeps the runs: a command that was stopped goes on with those that are missing, and `--table` writes
the table of those that are there. `--small` runs every row with few workers and steps, and writes no table.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.support.kept import kept
from benchmarks.support.options import benchmark_parser
from benchmarks.support.parts import Part
from benchmarks.support.tables import Table
from benchmarks.support.workers import worker_command
from offbeat.core.settings import build, lookup
from offbeat.experiments.job import Job
from offbeat.experiments.tasks import task
from offbeat.experiments.virtual_run import simulate
from offbeat.strategies import STRATEGIES
from offbeat.worlds.virtual.cluster import load_cluster

GROWTH = 1.25  # of the cost for each worker and step, from 1,000 workers to 10,000
PROPORTION = f"≤ {GROWTH} times the cost of 1,000 workers"


class Row(NamedTuple):
    """A run, and its goals; `steps` = 0 is an epoch."""

    task: str
    settings: str
    strategy: str
    workers: int
    steps: int
    cluster: str = "lan-1g"
    goals: tuple[str, ...] = ()

    @property
    def case(self) -> tuple[str, str, str, int, int, str]:
        return self[:6]

    @property
    def name(self) -> str:
        settings = [f"{key}={value}" for key, value in json.loads(self.settings).items()]
        return "-".join(map(str, [self.task, *self.case[2:], *settings]))

    @property
    def small(self) -> Row:
        """The same with few workers and steps."""
        return self._replace(workers=min(self.workers, 16), steps=min(self.steps, 4), goals=())


PLAIN = ("bsp", "local_sgd")
RUNS = [
    *(Row("quadratic", "{}", name, n, 100) for n in (100, 1_000) for name in PLAIN),
    *(Row("quadratic", "{}", name, 10_000, 100, goals=("< 20 s", PROPORTION)) for name in PLAIN),
    Row("quadratic", '{"dimension": 1000}', "bsp", 1_000, 100, goals=("< 2 GB",)),
    *(Row("digits", "{}", name, 64, 0, goals=("< 60 s",)) for name in PLAIN),
    Row("quadratic", "{}", "ssp", 200, 50, "stragglers", ("< 10 s",)),
    Row("quadratic", "{}", "ssd_sgd", 300, 100, goals=("< 600 µs",)),
    *(
        Row("quadratic", "{}", name, 1_000, 100, goals=("< 60 s",))
        for name in STRATEGIES.own
        if name not in PLAIN
    ),
]
Found = Mapping[Row, dict[str, Any]]


def cost_us(row: Row, found: Found) -> float:
    """Return the CPU time of one worker's step, in µs."""
    return float(1e6 * found[row]["cpu_s"] / row.workers / found[row]["steps"])


def is_met(goal: str, row: Row, found: Found) -> bool | None:
    """Return whether a goal is met; None if the run that it is compared with is not there."""
    if goal == PROPORTION:
        fewer = row._replace(workers=1_000, goals=())
        return cost_us(row, found) <= GROWTH * cost_us(fewer, found) if fewer in found else None
    limit, unit = goal.removeprefix("< ").split()
    measured = {
        "s": found[row]["cpu_s"],
        "GB": found[row]["memory"] / 1e9,
        "µs": cost_us(row, found),
    }
    return bool(measured[unit] < float(limit))


def verdict(found: Found) -> str:
    """Say which goals are met, and which rows miss theirs."""
    judged = [(row, goal, is_met(goal, row, found)) for row in found for goal in row.goals]
    met = [each for each in judged if each[2]]
    missed = [
        f"{row.strategy}, {row.task}, {row.workers:,} workers ({goal})"
        for row, goal, is_it in judged
        if is_it is False
    ]
    words = f"{len(met)} of {sum(len(row.goals) for row in RUNS)} goals are met"
    words += f"; missed: {'; '.join(missed)}" if missed else ""
    return words + (
        f"; not run: {len(RUNS) - len(found)} of {len(RUNS)} rows" if len(found) < len(RUNS) else ""
    )


def work(name: str, settings: str, strategy: str, workers: int, steps: int | None, cluster: str) -> None:
    """Simulate one run; print its seconds, memory and steps as JSON."""
    torch.set_num_threads(1)
    what = task(name, **json.loads(settings))
    job = Job(
        task=what,
        strategy=build(lookup("strategy", strategy, STRATEGIES), {}),
        workers=workers,
        steps=steps,
        epochs=None if steps else 1,
        evaluate_every=1_000_000,
        work="equal",
    )
    data, described = what.load(None), load_cluster(cluster)
    what.optimizer(what.build())  # imports a part of torch, whatever is simulated
    start, cpu_start = time.perf_counter(), time.process_time()
    last = simulate(job, described, data)[-1]
    took, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        json.dumps(
            {"took": took, "cpu_s": cpu_s, "memory": memory, "steps": last.step, "virtual": last.seconds}
        )
    )


def run(*case: object) -> dict[str, Any]:
    """Simulate one run in a process of its own."""
    command = worker_command("scale", "--worker", *case)
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def cells(row: Row, found: Found) -> list[str]:
    """Format a row of the table."""
    own = found[row]
    marks = {True: "met", False: "**missed**", None: "not known"}
    goals = [f"{goal}: {marks[is_met(goal, row, found)]}" for goal in row.goals]
    return [
        f"{row.task} {row.settings.strip('{}')}".strip(),
        row.strategy,
        row.cluster,
        f"{row.workers:,}",
        str(own["steps"]),
        f"{own['cpu_s']:.1f}",
        f"{own['took']:.1f}",
        f"{cost_us(row, found):.0f}",
        f"{own['memory'] / 1e9:.2f} GB",
        "; ".join(goals) or "–",
    ]


def measure(rows: Sequence[Row], out: Path) -> dict[Row, dict[str, Any]]:
    """Run the rows that are not kept in the folder; return what all of them took."""
    found = {}
    for row in rows:
        found[row], was_kept = kept(out / f"{row.name}.json", row.case, lambda row=row: run(*row.case))
        how = "kept" if was_kept else f"{found[row]['cpu_s']:.1f} CPU s"
        print(f"{row.name}: {how}, {cost_us(row, found):.0f} µs per worker and step", flush=True)
    return found


def read_kept(rows: Sequence[Row], out: Path) -> dict[Row, dict[str, Any]]:
    """Return what the rows took that are kept in the folder, whatever code they were of."""
    files = {row: out / f"{row.name}.json" for row in rows}
    return {row: json.loads(file.read_text())["result"] for row, file in files.items() if file.exists()}


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("scale", __doc__)
    parser.add_argument("--only", metavar="STRATEGY", help="run only the rows of this strategy")
    parser.add_argument("--part", type=Part.parse, metavar="K/N", help="run one of N parts; write no table")
    parser.add_argument("--small", action="store_true", help="few workers and steps; write no table")
    parser.add_argument("--table", action="store_true", help="write the table of the runs that are kept")
    parser.add_argument("--out", type=Path, default=Path("runs/scale"), metavar="FOLDER")
    parser.add_argument("--worker", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        name, settings, strategy, workers, steps, cluster = options.worker
        work(name, settings, strategy, int(workers), int(steps) or None, cluster)
        return
    rows = [row for row in RUNS if options.only in (None, row.strategy)]
    if options.part:
        rows = options.part.of(rows, cost=lambda row: row.workers)
    if options.small:
        measure(list(dict.fromkeys(row.small for row in rows)), options.out / "small")
        return
    found = (read_kept if options.table else measure)(rows, options.out)
    if options.part:
        return
    table = Table(
        "scale",
        __doc__ or "",
        [
            *("task", "strategy", "cluster", "workers", "steps"),
            *("CPU s", "seconds", "CPU µs per worker and step", "memory", "goals"),
        ],
        options.only or "",
    )
    for row in found:
        table.row(*cells(row, found))
    table.verdict = verdict(found)
    print(table.verdict)
    table.write()
