"""How many workers can virtual time simulate?

    python -m benchmarks run scale

100 steps of `quadratic` on one core. Goals: under 20 s for 10,000 workers of BSP and LocalSGD, and time in
proportion to workers times steps; under 60 s for 1,000 workers of every other strategy; under 10 s for SSP
with 200 workers, 50 steps and stragglers; under 60 s for one epoch of `digits` with 64 workers; under 2 GB of
memory for 1,000 workers with a model of 1,000 parameters. Each run is a process of its own. What torch
imports with the first optimizer, a second or more, is not counted. `--only ssp` runs one strategy. `--out`
keeps the runs: a command that was stopped goes on with those that are missing.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.support.kept import kept
from benchmarks.support.options import benchmark_parser
from benchmarks.support.tables import Table
from benchmarks.support.workers import worker_command
from offbeat.core.settings import build, lookup
from offbeat.experiments.job import Job
from offbeat.experiments.tasks import task
from offbeat.experiments.virtual_run import simulate
from offbeat.strategies import STRATEGIES
from offbeat.worlds.virtual.cluster import load_cluster

RUNS = [
    *(
        ("quadratic", "{}", name, n, 100, "lan-1g", "< 20 s")
        for n in (100, 1_000, 10_000)
        for name in ("bsp", "local_sgd")
    ),
    ("quadratic", '{"dimension": 1000}', "bsp", 1_000, 100, "lan-1g", "< 2 GB"),
    ("digits", "{}", "bsp", 64, None, "lan-1g", "< 60 s"),
    ("digits", "{}", "local_sgd", 64, None, "lan-1g", "< 60 s"),
    ("quadratic", "{}", "ssp", 200, 50, "stragglers", "< 10 s"),
    *(
        ("quadratic", "{}", name, 1_000, 100, "lan-1g", "< 60 s")
        for name in STRATEGIES.own
        if name not in ("bsp", "local_sgd")
    ),
]


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


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("scale", __doc__)
    parser.add_argument("--only", metavar="STRATEGY", help="run only the rows of this strategy")
    parser.add_argument("--out", type=Path, default=Path("runs/scale"), metavar="FOLDER")
    parser.add_argument("--worker", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        name, settings, strategy, workers, steps, cluster = options.worker
        work(name, settings, strategy, int(workers), int(steps) or None, cluster)
        return
    table = Table(
        "scale",
        __doc__ or "",
        [
            *("task", "strategy", "cluster", "workers", "steps"),
            *("seconds", "CPU s", "µs per worker and step", "memory", "goal"),
        ],
    )
    for name, settings, strategy, workers, steps, cluster, goal in RUNS:
        if options.only not in (None, strategy):
            continue
        case = (name, settings, strategy, workers, steps or 0, cluster)
        file = "-".join(str(each) for each in case if each is not settings)
        file += "-".join(["", *(f"{key}={value}" for key, value in json.loads(settings).items())])
        found, _ = kept(options.out / f"{file}.json", case, lambda case=case: run(*case))
        table.row(
            f"{name} {settings.strip('{}')}".strip(),
            strategy,
            cluster,
            f"{workers:,}",
            str(found["steps"]),
            f"{found['took']:.1f}",
            f"{found['cpu_s']:.1f}",
            f"{1e6 * found['took'] / workers / found['steps']:.0f}",
            f"{found['memory'] / 1e9:.2f} GB",
            goal,
        )
    table.write()
