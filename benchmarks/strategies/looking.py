"""Does evaluating after every step make training slower?

    python -m benchmarks run looking

On four emulated hosts at 200 Mbit/s a paced model trains, with as much computation (C) as an all-reduce of it
takes (K). Under each strategy rounds take turns in the same processes:

    never     no evaluation
    each      an evaluation after every step, for which all ranks enter `sync.consensus()` together
    settled   the same, with `sync.settle()` before it: it waits for what is in flight, and training with it

"alone": where a server holds the weights, rank 0 evaluates alone, as `offbeat train` does. The others stand
still for as long, from their next pull on, and no rank's clock counts it.

Seconds are those of training, without evaluations, and end when nothing is in flight. Goal: each / never at
most 1.05 for every rank. Evaluations once drained what was in flight, and made these strategies 39% to 89%
slower, with other settings: the column "once". What draining costs here is settled / never.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import offbeat
from benchmarks.support.hosts import Hosts
from benchmarks.support.limits import ring_s
from benchmarks.support.options import benchmark_parser
from benchmarks.support.tables import Table, interval
from benchmarks.support.workers import gather_rows, run_on_hosts
from offbeat import ASP, GSSP, OSP, SSDSGD, SSP, DiLoCo, Oscars
from offbeat.core.pending import block_on
from offbeat.experiments.process_run import ProcessWorker
from offbeat.experiments.tasks import task
from offbeat.worlds.processes.emulation import pace

HOSTS, RATE = 4, "200mbit"
WIDTH, LAYERS = 172, 8
NBYTES = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
BATCH = 8
WARM_UP = 20  # steps: OSP decides every 8 steps, SSD-SGD begins after 5
LEAD = 2  # steps before those that are measured: what the last round's end left behind is over then
STEPS = 10  # of a round; a multiple of the period and of the delay below
LONGER = {"oscars_alone": 40}  # a round holds some exchanges, which workers come to after different steps
KINDS = ("never", "each", "settled")
ALONE = "_alone"
STRATEGIES: dict[str, Any] = {
    "ssp": SSP(staleness=3),
    "asp": ASP(),
    "ssp_alone": SSP(staleness=3),
    "asp_alone": ASP(),
    "gssp_alone": GSSP(),
    "oscars_alone": Oscars(tau=5),
    "diloco": DiLoCo(period=5, delay=2),
    "ssd_sgd": SSDSGD(delay=5, warmup=5),
    "osp": OSP(growth=10),
}
BEFORE = {"ssp": 89, "asp": 79, "diloco": 66, "ssd_sgd": 40, "osp": 39}  # percent slower


class Looked:
    """A paced model under a strategy, which may be evaluated after every step."""

    def __init__(self, name: str, pace_s: float) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)
        pace(self.model, pace_s)
        self.sync = offbeat.attach(self.model, self.optimizer, STRATEGIES[name], timeout_s=120)
        self.worker = ProcessWorker(self.sync, task("quadratic"), self.model, [self.optimizer])
        self.alone = name.endswith(ALONE)
        self.batch = torch.randn(BATCH, WIDTH)
        self.looks = 0

    def round(self, steps: int, kind: str) -> list[float]:
        """Return the seconds of training per step, by rank."""
        dist.barrier()
        for _ in range(LEAD):
            self._step()
        began_s = self.sync.seconds
        for _ in range(steps):
            self._step()
            if kind == "settled":
                self.sync.settle()
            if kind != "never" and (not self.alone or dist.get_rank() == 0):
                block_on(self.worker.look(self._evaluate, self.alone, last=False))
        self.sync.settle()
        return [row[0] for row in gather_rows([(self.sync.seconds - began_s) / steps])]

    def _step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()

    def _evaluate(self, totals: object) -> None:
        with torch.no_grad():
            self.model(self.batch)
        self.looks += 1


def work(name: str, pace_s: float, rounds: int) -> None:
    """Train one rank in rounds of all kinds; rank 0 prints the seconds per step of each."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    looked = Looked(name, pace_s)
    looked.round(WARM_UP, "never")
    rows, steps = [], LONGER.get(name, STEPS)
    for number in range(rounds):
        order = KINDS[number % 3 :] + KINDS[: number % 3]
        rows.append({kind: looked.round(steps, kind) for kind in order})
    assert dist.get_rank() or looked.looks == 2 * rounds * steps
    dist.barrier()
    looked.sync.close()
    if dist.get_rank() == 0:
        print(json.dumps(rows))


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("looking", __doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--worker", nargs=2, metavar=("NAME", "PACE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work(options.worker[0], float(options.worker[1]), options.rounds)
        return
    columns = ["strategy", "ms per step, never", "each / never, slowest rank", "quartiles"]
    columns += ["each / never, ranks 0 to 3", "settled / never", "once"]
    table = Table("looking", __doc__ or "", columns)
    with Hosts(count=HOSTS, rate=RATE) as hosts:
        table.note(hosts.describe_link())
        pace_s = ring_s(NBYTES, HOSTS, min(hosts.probe()))
        table.note(
            f"C = K = {1e3 * pace_s:.0f} ms; {options.rounds} rounds of {STEPS} steps of each kind, Oscars 40"
        )
        for name in options.only:
            worker = ["--worker", name, pace_s, "--rounds", options.rounds]
            report(table, name, run_on_hosts(hosts, "looking", *worker, timeout=600))
    table.write()


def report(table: Table, name: str, rows: list[dict[str, list[float]]]) -> None:
    """Add the row of a strategy."""

    def slowest(kind: str) -> list[float]:
        return [max(row[kind]) / max(row["never"]) for row in rows]

    ranks = [statistics.median(row["each"][k] / row["never"][k] for row in rows) for k in range(HOSTS)]
    percent = BEFORE.get(name)
    table.row(
        name.replace(ALONE, ", alone"),
        f"{1e3 * statistics.median(max(row['never']) for row in rows):.1f}",
        f"{statistics.median(slowest('each')):.3f}",
        interval(slowest("each")),
        ", ".join(f"{ratio:.3f}" for ratio in ranks),
        f"{statistics.median(slowest('settled')):.3f}",
        f"{1 + percent / 100:.2f}" if percent else "",
    )
