"""Which strategies live on the internet, what do they reach there, and what would it cost?

    python -m benchmarks run internet
    python -m benchmarks run internet --workers 10000 --only asp

Two hours of virtual time on the preset `internet`: 1,000 consumer GPUs in 12 regions that live 40 minutes on
average. `quadratic`, and `digits` with one image a step. Strategies with a server come and go at it. Those
without one run twice: elastic workers go on without the dead, others wait for them. Money counts the machines
that are there, and the server's, each for `--price`, until the target (0.1 of the quadratic's loss, 0.9 of
digits' accuracy), or else until the end. Each run is a process of its own, `--jobs` at a time; its seconds
are CPU seconds. `--out` keeps the runs, and a report page of each task.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.support.options import benchmark_parser
from benchmarks.support.tables import Table
from benchmarks.support.workers import worker_command
from offbeat.cli.parse import strategies_of
from offbeat.core.ledger import WorkerTotals
from offbeat.core.units import size
from offbeat.errors import OffbeatError
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback
from offbeat.experiments.planner.cost import Price, away_seconds
from offbeat.experiments.planner.trials import least_minimum
from offbeat.experiments.report.page import write_page
from offbeat.experiments.tasks import task
from offbeat.experiments.tasks.quadratic import Quadratic
from offbeat.experiments.time_limit import churned
from offbeat.experiments.virtual_run import simulate_here
from offbeat.worlds.virtual.cluster import load_cluster

UNTIL_S = 7200.0
STEPS = 1_000  # on average, more than anybody can do in that time
LONGEST_S = 900.0  # of real time, for one run
SERVED = (
    "asp",
    "ssp",
    "dssp",
    "gssp",
    "oscars",
    "diloco(on=server,period=8)",
    "ssd_sgd(on=server)",
)
LEFT_OUT = "`osp(on=server)` is left out: its server has no weights, so no worker can come back."
COLLECTIVE = ("bsp", "local_sgd", "selsync", "diloco(period=8)", "sparse_loco(period=8)", "osp", "ssd_sgd")
SERVER, ELASTIC, WAITS = "server", "elastic", "waits"
TASKS: dict[str, dict[str, Any]] = {"quadratic": {}, "digits": {"batch_size": 1}}
TARGETS = {"quadratic": 0.1, "digits": 0.9}


class PlainQuadratic(Quadratic):
    """The quadratic with torch's SGD, which a server can run: its own optimizer is for workers alone."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr)


class Case(NamedTuple):
    task: str
    strategy: str
    how: str
    workers: int

    @property
    def folder(self) -> str:
        return "-".join([self.task, self.strategy.partition("(")[0], self.how])


def cases(workers: int, only: str | None) -> Iterator[Case]:
    """Yield the runs; with more workers than digits has images, of the quadratic alone."""
    for name in TASKS if workers <= 1000 else ("quadratic",):
        ways = [(strategy, SERVER) for strategy in SERVED]
        ways += [(strategy, how) for strategy in COLLECTIVE for how in (ELASTIC, WAITS)]
        for strategy, how in ways:
            if only in (None, strategy, strategy.partition("(")[0]):
                yield Case(name, strategy, how, workers)


def no_callbacks(
    latest: Callable[[], list[WorkerTotals]], hosts: Callable[[], dict[int, str]] = dict
) -> list[Callback]:
    return []


def work(case: Case, out: Path) -> None:
    """Simulate one run into a folder; print what became of it as JSON."""
    torch.set_num_threads(1)
    what = task(case.task, **TASKS[case.task])
    (strategy,) = strategies_of(case.strategy, [])
    half = strategy.server_half()
    if case.task == "quadratic" and half is not None and half.owns_optimizer:
        what = PlainQuadratic()
    job = Job(
        task=what,
        strategy=strategy,
        workers=case.workers,
        steps=STEPS,
        evaluate_every=10,
        target=TARGETS[case.task],
    )
    what.optimizer(what.build())  # imports a part of torch, whatever is simulated
    began, problem = time.process_time(), ""
    try:
        minimum = least_minimum(job) if case.how == ELASTIC else None
        simulate_here(job, "internet", what.load(None), out, no_callbacks, minimum=minimum, until_s=UNTIL_S)
    except OffbeatError as error:
        problem = str(error)
    found: dict[str, Any] = {"cpu_s": time.process_time() - began, "problem": problem}
    cluster = churned(job, load_cluster("internet").for_workers(case.workers), UNTIL_S)
    file = out / "summary.json"
    if file.exists():
        summary = json.loads(file.read_text())
        reached_s = summary["seconds_to_target"]
        if reached_s is not None and reached_s > UNTIL_S:  # by the step during which the time was up
            reached_s = None
        end_s = reached_s or min(UNTIL_S, max_seconds(summary))
        machines = case.workers + (case.how == SERVER)
        found |= {
            "value": summary["value"],
            "reached_s": reached_s,
            "ended_s": min(UNTIL_S, max_seconds(summary)),
            "batches": sum(worker["steps"] - worker["lost_steps"] for worker in summary["per_worker"]),
            "bytes": (summary["bytes_sent"] + summary["bytes_server"]) / case.workers,
            "machine_s": machines * end_s - away_seconds(cluster.away, end_s),
        }
    print(json.dumps(found))


def max_seconds(summary: dict[str, Any]) -> float:
    """Return the training time of the worker with most of it."""
    return max(worker["compute_s"] + worker["wait_s"] for worker in summary["per_worker"])


def run(case: Case, out: Path) -> dict[str, Any]:
    """Run a case in a process of its own."""
    command = worker_command("internet", "--worker", json.dumps(case), "--out", out / case.folder)
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        return {"cpu_s": LONGEST_S, "problem": f"not ended after {LONGEST_S:g} s of real time"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def shown(found: dict[str, Any], price: Price) -> list[str]:
    """Format what became of a run: its fate, what it reached, and what it cost."""
    if found["problem"]:
        fate = re.split(r"[:;(]", found["problem"])[0].strip()  # what comes after it tells what to do
        if "ended_s" in found:
            fate = f"ends after {found['ended_s']:.0f} s: {fate}"
    elif found.get("value") is None:
        fate = "stands nearly still: not evaluated even once"
    else:
        fate = "lives"
    if "value" not in found:
        return [fate, "–", "–", "–", "–", "–", f"{found['cpu_s']:.0f}"]
    value, reached = found["value"], found["reached_s"]
    return [
        fate,
        f"{found['batches']:,}",
        "–" if value is None else f"{value:.3g}",
        "–" if reached is None else f"{reached / 60:.0f} min",
        size(found["bytes"]),
        price.write(price.of(found["machine_s"])),
        f"{found['cpu_s']:.0f}",
    ]


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("internet", __doc__)
    parser.add_argument("--workers", type=int, default=1000, metavar="N")
    parser.add_argument("--only", metavar="STRATEGY", help="run only this strategy")
    parser.add_argument("--price", default="$0.25/h", help="of a machine for an hour (default: $0.25/h)")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="runs at a time (default: 2)")
    parser.add_argument("--out", type=Path, default=Path("runs/internet"), metavar="FOLDER")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work(Case(*json.loads(options.worker)), options.out)
        return
    price, began = Price.parse(options.price), time.monotonic()
    variant = "" if options.workers == 1000 and options.only is None else f"{options.workers}-workers"
    table = Table(
        "internet",
        __doc__ or "",
        [
            *("task", "strategy", "how", "what becomes of it", "batches that count", "value"),
            *("to the target", "bytes a worker", "cost", "CPU s"),
        ],
        variant,
    )
    planned = list(cases(options.workers, options.only))
    cpu_s = 0.0
    lived: dict[str, list[Path]] = {}  # the folders of each task's runs that came to the end
    with ThreadPoolExecutor(options.jobs) as pool:
        for case, found in zip(planned, pool.map(lambda case: run(case, options.out), planned), strict=True):
            table.row(case.task, case.strategy, case.how, *shown(found, price))
            cpu_s += found["cpu_s"]
            if not found["problem"]:
                lived.setdefault(case.task, []).append(options.out / case.folder)
    table.note(LEFT_OUT)
    table.note(
        f"{options.workers:,} workers, {options.price}; all runs took {cpu_s / 60:.1f} minutes of CPU time, "
        f"and {(time.monotonic() - began) / 60:.1f} of real time, {options.jobs} at a time."
    )
    table.write()
    for name, folders in lived.items():
        write_page(options.out / f"{name}.html", folders)
        print(f"written: {options.out / name}.html")
