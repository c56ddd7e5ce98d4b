"""How much communication do OSP and SSD-SGD hide behind computation?

    python -m benchmarks run overlap

On four emulated hosts, a paced model of 32 equal layers trains in the same processes, in turn, under torch's
DDP (buckets of a layer or two), BSP, a BSP that does not overlap ("plain"), OSP and SSD-SGD. C is the
computation time of a step, K the time of a ring all-reduce of the model.

Goals: OSP at K = C at least 1.25x DDP's samples per second and 1.7x plain BSP's, and at every rate at least
0.97x BSP's. SSD-SGD at K = 1.5C and 2C at least 1.5x DDP's, with bytes sent by each host within 3% of
|w|(1+2/k)(N−1)/N, with momentum. Each within 7% of the limit for its own bytes.

"coded" is OSP with ErrorFeedback(TopK(0.1)) on its background stage; "at_once" is SSD-SGD without staggered
pulls.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from benchmarks.support.hosts import Hosts
from benchmarks.support.limits import ring_s
from benchmarks.support.options import benchmark_parser
from benchmarks.support.tables import Table, interval
from benchmarks.support.workers import run_on_hosts, slowest
from offbeat import BSP, OSP, SSDSGD, ErrorFeedback, TopK
from offbeat.core.blocks import Block
from offbeat.core.port import Port
from offbeat.core.replica import Replica
from offbeat.strategies.bsp import BSPState
from offbeat.worlds.processes.emulation import pace

HOSTS = 4
WIDTH, LAYERS = 280, 32
BATCH = 8
WARM_UP = 20  # steps: OSP decides every 8 steps, SSD-SGD begins after 5
DELAY = 5
NBYTES = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
BUCKET_MB = 1  # for DDP: with its default of 25, a model of 10 MB could not overlap at all
CASES = (  # rate, K/C, contenders
    ("200mbit", 1.0, ("ddp", "bsp", "plain", "osp")),
    ("200mbit", 1.5, ("ddp", "osp", "coded", "ssd_sgd", "at_once")),
    ("200mbit", 2.0, ("ddp", "osp", "coded", "ssd_sgd")),
    ("1gbit", 0.2, ("bsp", "osp")),  # the same computation at other rates
    ("1gbit", 1.0, ("ddp", "bsp", "osp")),
    ("50mbit", 4.0, ("bsp", "osp")),
)


class PlainBSP(BSP):
    """BSP that sends nothing before backward has ended, the baseline of the OSP paper."""

    name = "plain"

    def ready(self, state: BSPState, replica: Replica, block: Block, port: Port) -> None:
        if block is replica.blocks[-1]:
            for each in replica.blocks:
                super().ready(state, replica, each, port)


STRATEGIES: dict[str, Any] = {
    "bsp": BSP(),
    "plain": PlainBSP(),
    "osp": OSP(growth=10),
    "coded": OSP(growth=10, codec=ErrorFeedback(TopK(0.1))),
    "ssd_sgd": SSDSGD(delay=DELAY, warmup=5),
    "at_once": SSDSGD(delay=DELAY, warmup=5, staggered=False),
}


def build() -> nn.Module:
    """Build the model of equal layers."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)
    return nn.Sequential(*layers)


class Contender:
    """Model under DDP or a strategy, trained in turn with the others."""

    def __init__(self, name: str, pace_s: float) -> None:
        self.model = build()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)
        self.sync: offbeat.Sync | None = None
        self.forward: nn.Module = self.model
        pace(self.model, pace_s)
        if name == "ddp":
            self.forward = DistributedDataParallel(self.model, bucket_cap_mb=BUCKET_MB)
        else:
            self.sync = offbeat.attach(self.model, self.optimizer, STRATEGIES[name], timeout_s=120)
        self.batch = torch.randn(BATCH, WIDTH)

    def steps(self, count: int) -> float:
        """Return the seconds per step; communication is pending at the end as it was at the start."""
        start = time.perf_counter()
        for _ in range(count):
            self.optimizer.zero_grad()
            self.forward(self.batch).square().mean().backward()
            self.optimizer.step()
        return (time.perf_counter() - start) / count

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent; 0 under DDP, which does not count them."""
        return self.sync.metrics.bytes_sent if self.sync else 0

    def close(self) -> None:
        if self.sync:
            self.sync.settle()
            dist.barrier()
            self.sync.close()


def work(names: list[str], pace_s: float, rounds: int, steps: int, warm_up: int) -> None:
    """Train one rank in rounds of all contenders; rank 0 prints the seconds per step of each round."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    contenders = {name: Contender(name, pace_s) for name in names}
    for contender in contenders.values():
        contender.steps(warm_up)
    rows = []
    for round_ in range(rounds):
        row = {}
        for name in sorted(names, reverse=bool(round_ % 2)):
            contender = contenders[name]
            dist.barrier()
            contender.steps(2)  # discarded: the turns of others have disturbed them
            before = contender.sent
            own_s = contender.steps(steps)
            sent = (contender.sent - before) / steps
            row[name] = {"step_s": slowest(own_s), "sent": sent}
        rows.append(row)
    late = {name: _late_fraction(c) for name, c in contenders.items() if name in ("osp", "coded")}
    for contender in contenders.values():
        contender.close()
    if dist.get_rank() == 0:
        print(json.dumps({"rows": rows, "late": late}))


def _late_fraction(contender: Contender) -> float:
    """Return the fraction of the model's bytes that OSP sends in the background."""
    assert contender.sync is not None
    conductor = contender.sync._session.conductor
    blocks = conductor.replica.blocks
    return sum(blocks[k].numel for k in conductor.state.late) / sum(block.numel for block in blocks)


@dataclass(frozen=True)
class Limit:
    """Lower bounds on the seconds per step, from computation (a third of it forward) and all-reduce."""

    compute_s: float
    all_reduce_s: float

    def of(self, name: str, sent: float) -> float:
        """Return the bound of a contender; `sent` is bytes sent per step divided by the model's bytes."""
        c, k = self.compute_s, self.all_reduce_s
        return {
            "ddp": c / 3 + max(2 * c / 3, k),
            "bsp": c / 3 + max(2 * c / 3, k),
            "plain": c + k,
            "osp": max(c, k),
            "coded": max(c, k * sent * HOSTS / (2 * (HOSTS - 1))),
            "ssd_sgd": max(c, k * (1 + 2 / DELAY) / 2),  # with momentum
            "at_once": max(c, k * (1 + 2 / DELAY) / 2),
        }[name]


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("overlap", __doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="steps per round, a multiple of the delay 5")
    parser.add_argument("--cases", type=int, nargs="+", default=range(len(CASES)), help="their numbers")
    parser.add_argument("--worker", nargs=2, metavar=("NAMES", "PACE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work(options.worker[0].split(","), float(options.worker[1]), options.rounds, options.steps, WARM_UP)
        return
    columns = ["rate", "K / C", "strategy", "ms per step", "limit ms", "/ limit", "x DDP", "x plain BSP"]
    table = Table("overlap", __doc__ or "", [*columns, "x BSP", "bytes sent / |w|", "note"])
    with Hosts(count=HOSTS, rate=CASES[0][0]) as hosts:
        rate_now, bytes_s = "", 0.0
        for rate, ratio, names in (CASES[case] for case in options.cases):
            if rate != rate_now:
                hosts.set_rate(rate)
                table.note(hosts.describe_link())
                bytes_s, rate_now = min(hosts.probe()), rate
            all_reduce_s = ring_s(NBYTES, HOSTS, bytes_s)
            limit = Limit(all_reduce_s / ratio, all_reduce_s)
            steps = options.steps if all_reduce_s < 1 else 4
            worker = ["--worker", ",".join(names), limit.compute_s]
            worker += ["--rounds", options.rounds, "--steps", steps]
            measured = run_on_hosts(hosts, "overlap", *worker, timeout=1500)
            report(table, rate, ratio, names, limit, measured)
    table.write()


def report(
    table: Table, rate: str, ratio: float, names: tuple[str, ...], limit: Limit, measured: dict[str, Any]
) -> None:
    """Add the rows of one case."""
    rows = measured["rows"]

    def against(other: str, name: str) -> str:
        if other not in names or other == name:
            return ""
        ratios = [row[other]["step_s"] / row[name]["step_s"] for row in rows]
        return f"{statistics.median(ratios):.3f} ({interval(ratios)})"

    for name in names:
        step_s = statistics.median(row[name]["step_s"] for row in rows)
        sent = statistics.median(row[name]["sent"] for row in rows) / NBYTES
        note = f"{measured['late'][name]:.2f} of the bytes late" if name in measured["late"] else ""
        if name in ("ssd_sgd", "at_once"):
            note = f"goal {(1 + 2 / DELAY) * (HOSTS - 1) / HOSTS:.3f} |w| ± 3%"
        table.row(
            rate,
            f"{ratio:g}",
            name,
            f"{1e3 * step_s:.1f}",
            f"{1e3 * limit.of(name, sent):.1f}",
            f"{step_s / limit.of(name, sent):.3f}",
            against("ddp", name),
            against("plain", name),
            against("bsp", name),
            f"{sent:.3f}" if sent else "",
            note,
        )
