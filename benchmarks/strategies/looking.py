"""Does evaluating after every step make training slower?

    python -m benchmarks run looking

On four emulated hosts at 200 Mbit/s a paced model trains, with as much computation (C) as an all-reduce of it
takes (K). Under each strategy rounds take turns in the same processes:

    never     no evaluation
    each      an evaluation after every step, for which all ranks enter `sync.consensus()` together
    settled   the same, with `sync.settle()` before it: it waits for what is in flight, and training with it

"alone": where a server holds the weights, rank 0 evaluates alone, as `offbeat train` does, while the others
train on. It falls behind by what an evaluation takes on it, and under SSP the others wait for it.

Seconds are those of training, without evaluations, and end when nothing is in flight. Goal: each / never at
most 1.05 for the slowest rank, and where rank 0 evaluates alone for rank 0, whose seconds `offbeat train`
reports. Evaluations once drained what was in flight, and made these strategies 39% to 89% slower, with other
settings: the column "once". What draining costs here is settled / never.
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
from benchmarks.support.workers import run_on_hosts, slowest
from offbeat import ASP, OSP, SSDSGD, SSP, DiLoCo
from offbeat.core.pending import block_on
from offbeat.experiments.process_run import ProcessWorker
from offbeat.experiments.tasks import task
from offbeat.worlds.processes.emulation import pace

HOSTS, RATE = 4, "200mbit"
WIDTH, LAYERS = 172, 8
NBYTES = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
BATCH = 8
WARM_UP = 20  # steps: OSP decides every 8 steps, SSD-SGD begins after 5
STEPS = 10  # of a round; a multiple of the period and of the delay below
KINDS = ("never", "each", "settled")
ALONE = "_alone"
STRATEGIES: dict[str, Any] = {
    "ssp": SSP(staleness=3),
    "asp": ASP(),
    "ssp_alone": SSP(staleness=3),
    "asp_alone": ASP(),
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

    def round(self, steps: int, kind: str) -> dict[str, float]:
        """Return the seconds of training per step, of this rank and of the slowest."""
        dist.barrier()
        began_s = self.sync.seconds
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(self.batch).square().mean().backward()
            self.optimizer.step()
            if kind == "settled":
                self.sync.settle()
            if kind != "never" and (not self.alone or dist.get_rank() == 0):
                block_on(self.worker.look(self._evaluate, self.alone, last=False))
        self.sync.settle()
        own_s = (self.sync.seconds - began_s) / steps
        return {"own": own_s, "slowest": slowest(own_s)}

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
    rows = []
    for number in range(rounds):
        order = KINDS[number % 3 :] + KINDS[: number % 3]
        rows.append({kind: looked.round(STEPS, kind) for kind in order})
    assert dist.get_rank() or looked.looks == 2 * rounds * STEPS
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
    columns += ["each / never, rank 0", "settled / never", "once"]
    table = Table("looking", __doc__ or "", columns)
    with Hosts(count=HOSTS, rate=RATE) as hosts:
        table.note(hosts.describe_link())
        pace_s = ring_s(NBYTES, HOSTS, min(hosts.probe()))
        table.note(f"C = K = {1e3 * pace_s:.0f} ms; {options.rounds} rounds of {STEPS} steps of each kind")
        for name in options.only:
            worker = ["--worker", name, pace_s, "--rounds", options.rounds]
            report(table, name, run_on_hosts(hosts, "looking", *worker, timeout=600))
    table.write()


def report(table: Table, name: str, rows: list[dict[str, dict[str, float]]]) -> None:
    """Add the row of a strategy."""

    def ratios(kind: str, whose: str) -> list[float]:
        return [row[kind][whose] / row["never"][whose] for row in rows]

    percent = BEFORE.get(name)
    table.row(
        name.replace(ALONE, ", alone"),
        f"{1e3 * statistics.median(row['never']['slowest'] for row in rows):.1f}",
        f"{statistics.median(ratios('each', 'slowest')):.3f}",
        interval(ratios("each", "slowest")),
        f"{statistics.median(ratios('each', 'own')):.3f}",
        f"{statistics.median(ratios('settled', 'slowest')):.3f}",
        f"{1 + percent / 100:.2f}" if percent else "",
    )
