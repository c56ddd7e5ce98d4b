"""Does virtual time know what deaths cost?

    python -m benchmarks run kills --data FOLDER [--strategies bsp,local_sgd,diloco,ssp] [--seconds 100]

`offbeat plan --mtbf` kills workers in virtual time. Here they are killed for real, at the same seconds. Eight
workers on four emulated hosts train Fashion-MNIST at 200 Mbit/s, all with the same pace. Each lives for 40 s
on average, as `RandomFailures` draws it for the planner, and is started again 5 s after its death by a warm
launcher (see `chaos`). Under a strategy with a server the first worker is spared, as in a plan.

Nothing is calibrated: the virtual cluster has the emulated rate, the pace, and the defaults of `[elastic]`.
Counted are the steps of all workers, from the moment when each has taken one. Goals: samples per second with
kills within 7% of the prediction, and the strategies in the predicted order.
"""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.chaos.cluster import TCP_PORT, Cluster
from benchmarks.chaos.job import ALL, BATCH, HOSTS, LR, WORKERS, Job
from benchmarks.chaos.run import Watch
from benchmarks.chaos.worker import make_task
from benchmarks.support.hosts import Hosts
from benchmarks.support.kept import code_print
from benchmarks.support.options import add_data_option, benchmark_parser, require_data
from benchmarks.support.parts import exit_on_signals
from benchmarks.support.raw import RawResults
from benchmarks.support.tables import Table, machine
from offbeat.core.blocks import block_sizes, make_blocks
from offbeat.core.ledger import WorkerTotals
from offbeat.core.units import parse_rate
from offbeat.experiments.job import Job as Training
from offbeat.experiments.loop import Callback, Evaluation
from offbeat.experiments.planner.trials import least_minimum
from offbeat.experiments.virtual_run import simulate
from offbeat.worlds.virtual import cluster as virtual
from offbeat.worlds.virtual.costs import ShardCost
from offbeat.worlds.virtual.failures import RandomFailures
from offbeat.worlds.virtual.step_times import Measured

NAME = "kills"
STRATEGIES = ("bsp", "local_sgd", "diloco", "ssp")
RATE, PACE_S = "200mbit", 0.5
HEADERS = 0.044  # of TCP, at 1500 bytes a packet
COMPUTED = 0.04  # of a step, when all gradients are there
LOOPBACK = 1e11  # bits per second between workers of one host
FAILURES = RandomFailures(mtbf_s=40.0, rejoin_s=5.0)
SEED = 7
CALM_S = 40.0  # over which undisturbed samples per second are taken
WITHIN = 0.07
COLUMNS = (
    "strategy",
    "deaths",
    "samples/s undisturbed: predicted",
    "measured",
    "samples/s with deaths: predicted",
    "measured",
    "predicted / measured (goal 0.93 to 1.07)",
    "fraction kept: predicted",
    "measured",
)


@dataclass(frozen=True)
class Schedule:
    """The deaths and returns of a run, in seconds from its start."""

    absences: tuple[virtual.Absence, ...]

    @classmethod
    def of(cls, strategy: str, seconds: float) -> Schedule:
        """Draw the deaths as the planner does."""
        spared = int(ALL[strategy].server_half() is not None)
        drawn = (FAILURES.absences(worker, SEED, seconds) for worker in range(spared, WORKERS))
        return cls(tuple(absence for own in drawn for absence in own))

    @property
    def orders(self) -> list[tuple[float, str, int]]:
        """What is to be done to which worker, in order of time."""
        ends = ((each.until_s, "start", each.worker) for each in self.absences)
        return sorted([*((each.from_s, "stop", each.worker) for each in self.absences), *ends])


class Kills:
    """Disturbance of a run: workers are stopped and started when it is their time."""

    def __init__(self, schedule: Schedule, order: Callable[[int, str], None]) -> None:
        self._began_s = time.time()
        self._orders, self._order = schedule.orders, order

    def go_on(self, now_s: float) -> None:
        """Do what is due."""
        while self._orders and self._orders[0][0] <= now_s - self._began_s:
            _, what, worker = self._orders.pop(0)
            self._order(worker, what)

    def end(self) -> None:
        """Nothing is left broken: the run ends here."""


def measure(hosts: Hosts, strategy: str, data: Path, seconds: float, schedule: Schedule | None) -> float:
    """Train on the hosts; return the samples per second of all workers."""
    folder = tempfile.mkdtemp()
    try:
        address = f"{hosts.address(0)}:{TCP_PORT}"
        job = Job(strategy=strategy, address=address, data=str(data), folder=folder, pace=PACE_S)
        with Cluster(hosts, job) as cluster:
            watch = Watch(cluster, math.inf, "with deaths" if schedule else "undisturbed")
            kills = None if schedule is None else Kills(schedule, cluster.order)
            return float(watch.measure(seconds, kills)["samples_per_s"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class StepCount(Callback):
    """Callback that notes the steps of all workers at every evaluation."""

    def __init__(self) -> None:
        self.steps, self.seconds = 0, math.nan

    def evaluated(self, history: list[Evaluation], worker_totals: list[WorkerTotals]) -> None:
        self.steps = sum(totals.steps for totals in worker_totals)
        self.seconds = history[-1].seconds


def virtual_cluster() -> virtual.Cluster:
    """Return the emulated hosts: two workers each, which share its link.

    A server's shards are beside the workers, two on each link; the real one has a shard on each host.
    Workers compute first, and sleep for the rest of a step, while gradients travel.
    """
    rate = parse_rate(RATE)
    params = [(name, param) for name, param in make_task().build().named_parameters()]
    blocks = make_blocks(params, *block_sizes(sum(param.nbytes for _, param in params)))
    step_s = Measured(measured_s=(PACE_S,), ready=len(blocks) * (COMPUTED,))
    hosts = [f"host{index}" for index in range(HOSTS)]
    fast = {"up_bits_per_s": LOOPBACK, "down_bits_per_s": LOOPBACK}
    return virtual.Cluster(
        workers=tuple(
            virtual.Workers(step_s=step_s, site=hosts[slot % HOSTS], **fast) for slot in range(WORKERS)
        ),
        sites=tuple(virtual.Site(name=name, up_bits_per_s=rate, down_bits_per_s=rate) for name in hosts),
        headers=HEADERS,
        forward_share=COMPUTED / 2,
        shards=ShardCost(pieces=1, copies=1),  # as `offbeat serve --replicate` has them
    )


def predict(strategy: str, data: Any, seconds: float, schedule: Schedule | None) -> float:
    """Train in virtual time; return the samples per second of all workers."""
    task = replace(make_task(), batch_size=BATCH, lr=LR)
    steps = math.ceil(2 * seconds / PACE_S)
    job = Training(task=task, strategy=ALL[strategy], workers=WORKERS, steps=steps, evaluate_every=2)
    cluster = virtual_cluster()
    minimum = None
    if schedule is not None:
        cluster = replace(cluster, away=schedule.absences)
        minimum = None if job.strategy.server_half() is not None else least_minimum(job)
    counted = StepCount()
    simulate(job, cluster, data, lambda ledgers: [counted], minimum=minimum, until_s=seconds)
    return counted.steps * BATCH / counted.seconds


def run(hosts: Hosts, strategy: str, data: Path, seconds: float) -> dict[str, Any]:
    """Predict and measure a strategy, undisturbed and with deaths."""
    schedule = Schedule.of(strategy, seconds)
    loaded = make_task().load(data)
    found: dict[str, Any] = {"deaths": len(schedule.absences), "seconds": seconds}
    for kind, lasts_s, deaths in (("calm", CALM_S, None), ("killed", seconds, schedule)):
        predicted = predict(strategy, loaded, lasts_s, deaths)
        found[kind] = [predicted, measure(hosts, strategy, data, lasts_s, deaths)]
    return found


def write_table(raw: RawResults, names: Sequence[str]) -> None:
    """Write what was kept of these strategies."""
    table = Table(NAME, __doc__ or "", COLUMNS)
    found = {name: result for name in names if (result := raw.get(name))}
    ratios = [result["killed"][0] / result["killed"][1] for result in found.values()]
    near = sum(abs(ratio - 1) <= WITHIN for ratio in ratios)
    orders = [sorted(found, key=lambda name: -found[name]["killed"][world]) for world in (0, 1)]
    same = "as predicted" if orders[0] == orders[1] else f"measured {', '.join(orders[1])}"
    table.verdict = f"within 7%: {near} of {len(found)}; order {same}"
    for name, result in found.items():
        (calm, real_calm), (killed, real_killed) = result["calm"], result["killed"]
        numbers = [f"{each:.0f}" for each in (calm, real_calm, killed, real_killed)]
        ratio = f"{killed / real_killed:.3f}"
        table.row(
            name,
            str(result["deaths"]),
            *numbers,
            ratio,
            f"{killed / calm:.3f}",
            f"{real_killed / real_calm:.3f}",
        )
    table.write()


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("kills", __doc__)
    parser.add_argument("--seconds", type=float, default=100.0, help="of a run with deaths (default: 100)")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="names, with commas")
    parser.add_argument("--again", action="store_true", help="run kept strategies again")
    add_data_option(parser)
    options = parser.parse_args(arguments)
    names = options.strategies.split(",")
    unknown = [name for name in names if name not in ALL]
    if unknown:
        parser.error(f"unknown strategy {unknown[0]!r}; there are {', '.join(ALL)}")
    data = require_data(parser, options)
    raw, now = RawResults(NAME), {"code": code_print(), "machine": machine()}
    exit_on_signals()
    try:
        with Hosts(count=HOSTS, rate=RATE) as hosts:
            for name in names:
                kept = raw.get(name) or {}
                current = kept.get("seconds") == options.seconds and now.items() <= kept.items()
                if options.again or not current:
                    raw.keep(name, run(hosts, name, data, options.seconds) | now)
    except KeyboardInterrupt:
        print("interrupted; finished strategies are kept", file=sys.stderr)
    write_table(raw, [name for name in ALL if raw.get(name)])
