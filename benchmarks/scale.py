"""How far does virtual time scale?

    python -m benchmarks.scale

`quadratic` with 100, 1,000 and 10,000 workers, 100 steps under each strategy, one core: under 60 s for the
largest, and time in proportion to workers times steps. `digits` with 64 workers, one epoch: under 60 s.
Memory with 1,000 workers of a 1,000-parameter model: under 2 GB. Each run is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import torch

from benchmarks.tables import Table
from offbeat.core.settings import build, lookup
from offbeat.experiments.loop import Job
from offbeat.experiments.tasks import task
from offbeat.experiments.virtual_run import simulate
from offbeat.strategies import STRATEGIES
from offbeat.worlds.virtual.cluster import load_cluster

RUNS = [
    *(
        ("quadratic", "{}", name, n, 100, "< 60 s")
        for n in (100, 1_000, 10_000)
        for name in ("bsp", "local_sgd")
    ),
    ("quadratic", '{"dimension": 1000}', "bsp", 1_000, 100, "< 2 GB"),
    ("digits", "{}", "bsp", 64, None, "< 60 s"),
    ("digits", "{}", "local_sgd", 64, None, "< 60 s"),
]


def work(name: str, settings: str, strategy: str, workers: int, steps: int | None) -> None:
    torch.set_num_threads(1)
    what = task(name, **json.loads(settings))
    job = Job(
        task=what,
        strategy=build(lookup("strategy", strategy, STRATEGIES), {}),
        workers=workers,
        steps=steps,
        epochs=None if steps else 1,
        evaluate_every=1_000_000,
    )
    data, cluster = what.load(None), load_cluster("lan-1g")
    began = time.perf_counter()
    last = simulate(job, cluster, data)[-1]
    took = time.perf_counter() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"took": took, "memory": memory, "steps": last.step, "virtual": last.seconds}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        name, settings, strategy, workers, steps = options.worker
        work(name, settings, strategy, int(workers), int(steps) or None)
        return
    table = Table(
        "scale",
        __doc__ or "",
        ["task", "strategy", "workers", "steps", "seconds", "µs a worker and step", "memory", "goal"],
    )
    for name, settings, strategy, workers, steps, goal in RUNS:
        command = [sys.executable, "-m", "benchmarks.scale", "--worker", name, settings, strategy]
        done = subprocess.run(
            [*command, str(workers), str(steps or 0)], check=True, capture_output=True, text=True
        )
        found = json.loads(done.stdout.splitlines()[-1])
        table.row(
            f"{name} {settings.strip('{}')}".strip(),
            strategy,
            f"{workers:,}",
            str(found["steps"]),
            f"{found['took']:.1f}",
            f"{1e6 * found['took'] / workers / found['steps']:.0f}",
            f"{found['memory'] / 1e9:.2f} GB",
            goal,
        )
    table.write()


if __name__ == "__main__":
    main()
