"""The runs of the benchmark internet: strategies, tasks and what becomes of their workers.

Strategies with a server come and go at it. Those without one run twice: elastic workers go on without the
dead, others wait for them.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from offbeat.cli.parse import strategies_of
from offbeat.core.ledger import WorkerTotals
from offbeat.errors import OffbeatError
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback
from offbeat.experiments.planner.cost import away_seconds
from offbeat.experiments.planner.trials import least_minimum
from offbeat.experiments.tasks import task
from offbeat.experiments.tasks.quadratic import Quadratic
from offbeat.experiments.time_limit import churned
from offbeat.experiments.virtual_run import simulate_here
from offbeat.worlds.processes.launcher import IMPORTED, START_METHOD, start_fork_server
from offbeat.worlds.virtual.cluster import load_cluster

UNTIL_S = 7200.0
USUAL = 1000  # workers
STEPS = 1_000  # on average, more than anybody can do in that time
LONGEST_S = 3600.0  # of real time, for one run of the usual number of workers: others may use the machine
SERVED = (
    "asp",
    "ssp",
    "dssp",
    "gssp",
    "oscars",
    "diloco(on=server,period=8)",
    "ssd_sgd(on=server)",
)
COLLECTIVE = (
    *("bsp", "local_sgd", "selsync", "diloco(period=8)", "sparse_loco(period=8)", "osp", "ssd_sgd"),
    "auto",
)
LEFT_OUT = {"osp(on=server)": "its server has no weights, so no worker can come back"}
SERVER, ELASTIC, WAITS = "server", "elastic", "waits"
TASKS: dict[str, dict[str, Any]] = {"quadratic": {}, "digits": {"batch_size": 1, "model": "mlp"}}
TARGETS = {"quadratic": 0.1, "digits": 0.9}


class PlainQuadratic(Quadratic):
    """The quadratic with torch's SGD, which a server can run: its own optimizer is for workers alone."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr)


class Case(NamedTuple):
    """A strategy on a task, and how its workers live through absences."""

    task: str
    strategy: str
    how: str
    workers: int
    until_s: float = UNTIL_S

    @property
    def folder(self) -> str:
        return "-".join([self.task, self.strategy.partition("(")[0], self.how, str(self.workers)])

    @property
    def longest_s(self) -> float:
        """The seconds of real time after which the run is given up."""
        return LONGEST_S * max(1.0, self.workers / USUAL)


def cases(workers: int, only: str | None = None, until_s: float = UNTIL_S) -> Iterator[Case]:
    """Yield the runs; with more workers than digits has images, of the quadratic alone.

    `only` names strategies, with or without their settings, with commas in between.
    """
    wanted = None if only is None else {each.name for each in strategies_of(only, [])}
    for name in TASKS if workers <= USUAL else ("quadratic",):
        ways = [(strategy, SERVER) for strategy in SERVED]
        ways += [(strategy, how) for strategy in COLLECTIVE for how in (ELASTIC, WAITS)]
        for strategy, how in ways:
            if wanted is None or strategy.partition("(")[0] in wanted:
                yield Case(name, strategy, how, workers, until_s)


def no_callbacks(
    latest: Callable[[], list[WorkerTotals]], hosts: Callable[[], dict[int, str]] = dict
) -> list[Callback]:
    return []


def work(case: Case, out: Path) -> dict[str, Any]:
    """Simulate one run into a folder; return what became of it."""
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
        data = what.load(None)
        simulate_here(job, "internet", data, out, no_callbacks, minimum=minimum, until_s=case.until_s)
    except OffbeatError as error:
        problem = str(error)
    found: dict[str, Any] = {"cpu_s": time.process_time() - began, "problem": problem}
    cluster = churned(job, load_cluster("internet").for_workers(case.workers), case.until_s)
    file = out / "summary.json"
    if file.exists():
        summary = json.loads(file.read_text())
        reached_s = summary["seconds_to_target"]
        if reached_s is not None and reached_s > case.until_s:  # by the step during which the time was up
            reached_s = None
        ended_s = min(case.until_s, max_seconds(summary))
        end_s = reached_s or ended_s
        machines = case.workers + (case.how == SERVER)
        found |= {
            "value": summary["value"],
            "reached_s": reached_s,
            "ended_s": ended_s,
            "batches": sum(worker["steps"] - worker["lost_steps"] for worker in summary["per_worker"]),
            "bytes": (summary["bytes_sent"] + summary["bytes_server"]) / case.workers,
            "machine_s": machines * end_s - away_seconds(cluster.away, end_s),
        }
    return found


def max_seconds(summary: dict[str, Any]) -> float:
    """Return the training time of the worker with most of it."""
    return max(worker["compute_s"] + worker["wait_s"] for worker in summary["per_worker"])


def run(case: Case, out: Path) -> dict[str, Any]:
    """Run a case in a process of its own; a summary of an earlier one is removed."""
    (out / case.folder / "summary.json").unlink(missing_ok=True)
    context = multiprocessing.get_context(START_METHOD)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work_and_send, args=(sender, case, out / case.folder))
    process.start()
    sender.close()
    try:
        if not receiver.poll(case.longest_s):
            problem = f"not ended after {case.longest_s:g} s of real time"
            return {"cpu_s": case.longest_s, "problem": problem, "unfinished": True}
        found: dict[str, Any] = receiver.recv()
        return found
    except EOFError:
        raise RuntimeError(f"{case.folder} failed; its output is above") from None
    finally:
        process.kill()  # if it has not ended
        process.join()


def _work_and_send(sender: Connection, case: Case, out: Path) -> None:
    sender.send(work(case, out))


def prepare() -> None:
    """Import all that runs need once, in the process that they are forked from."""
    start_fork_server([*IMPORTED, __name__])
