"""What do OSP and SSD-SGD hide behind computation?

    python -m benchmarks.overlap

On 4 shaped hosts, a paced model of 32 equal layers, under torch DDP with buckets of a layer or two, BSP, a
BSP that does not overlap, OSP and SSD-SGD in the same processes, in turn. C is the computation of a step, K a
ring all-reduce of the model. Goals: OSP at K = C at least 1.25 times DDP's samples a second and 1.7 times the
plain BSP's, and at every rate at least 0.97 of BSP's. SSD-SGD at K = 1.5 C and 2 C at least 1.5 times DDP's,
with bytes out of each NIC within 3% of |w|(1+1/k)(N−1)/N. Each within 7% of the limit for its own bytes.
"coded" is OSP with ErrorFeedback(TopK(0.1)) on its background stage: what sending less there adds. "at_once"
is SSD-SGD whose pulls are not staggered: what staggering them gains.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from benchmarks.hosts import Hosts
from benchmarks.tables import Table, interval
from offbeat import BSP, OSP, SSDSGD, ErrorFeedback, TopK
from offbeat.core.blocks import Block
from offbeat.core.port import Port
from offbeat.core.replica import Replica
from offbeat.strategies.bsp import BSPState
from offbeat.worlds.processes.emulation import pace

HOSTS = 4
WIDTH, LAYERS = 280, 32
BATCH = 8
WARM_UP = 20  # steps: OSP asks all workers every 8, SSD-SGD begins after 5
DELAY = 5
NBYTES = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
BUCKET_MB = 1  # of DDP: its default of 25 would leave it nothing to overlap in a model of 10 MB
CASES = (  # rate, K/C, contenders
    ("200mbit", 1.0, ("ddp", "bsp", "plain", "osp")),
    ("200mbit", 1.5, ("ddp", "osp", "coded", "ssd_sgd", "at_once")),
    ("200mbit", 2.0, ("ddp", "osp", "coded", "ssd_sgd")),
    ("1gbit", 0.2, ("bsp", "osp")),  # the same computation at other rates
    ("1gbit", 1.0, ("ddp", "bsp", "osp")),
    ("50mbit", 4.0, ("bsp", "osp")),
)


class PlainBSP(BSP):
    """Sends nothing before backward has ended: the paper's baseline."""

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
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)
    return nn.Sequential(*layers)


class Contender:
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
        """Seconds a step. What is under way at the end stands for what was at the beginning."""
        began = time.perf_counter()
        for _ in range(count):
            self.optimizer.zero_grad()
            self.forward(self.batch).square().mean().backward()
            self.optimizer.step()
        return (time.perf_counter() - began) / count

    @property
    def sent(self) -> int:
        return self.sync.metrics.bytes_sent if self.sync else 0

    def close(self) -> None:
        if self.sync:
            self.sync.settle()
            dist.barrier()
            self.sync.close()


def work(names: list[str], pace_s: float, rounds: int, steps: int, warm_up: int) -> None:
    """One rank: rounds of all contenders, in turn; rank 0 prints the seconds a step of each round."""
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
            contender.steps(2)  # what another one's turn has disturbed
            before = contender.sent
            slowest = torch.tensor([contender.steps(steps)], dtype=torch.float64)
            sent = (contender.sent - before) / steps
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            row[name] = {"step_s": slowest.item(), "sent": sent}
        rows.append(row)
    late = {name: _late_share(c) for name, c in contenders.items() if name in ("osp", "coded")}
    for contender in contenders.values():
        contender.close()
    if dist.get_rank() == 0:
        print(json.dumps({"rows": rows, "late": late}))


def _late_share(contender: Contender) -> float:
    """Which part of the model's bytes OSP sends in the background."""
    assert contender.sync is not None
    conductor = contender.sync._session.conductor
    blocks = conductor.replica.blocks
    return sum(blocks[k].numel for k in conductor.state.late) / sum(block.numel for block in blocks)


@dataclass(frozen=True)
class Limit:
    """The least seconds a step (DESIGN: computation C, of which a third is forward; K a ring all-reduce)."""

    compute_s: float
    ring_s: float

    def of(self, name: str, sent: float) -> float:
        """`sent`: bytes out of a NIC, to those of the model."""
        c, k = self.compute_s, self.ring_s
        return {
            "ddp": c / 3 + max(2 * c / 3, k),
            "bsp": c / 3 + max(2 * c / 3, k),
            "plain": c + k,
            "osp": max(c, k),
            "coded": max(c, k * sent * HOSTS / (2 * (HOSTS - 1))),
            "ssd_sgd": max(c, k * (1 + 1 / DELAY) / 2),
            "at_once": max(c, k * (1 + 1 / DELAY) / 2),
        }[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="a round; a multiple of SSD-SGD's delay")
    parser.add_argument("--cases", type=int, nargs="+", default=range(len(CASES)), help="which, from 0 on")
    parser.add_argument("--worker", nargs=2, metavar=("NAMES", "PACE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker[0].split(","), float(options.worker[1]), options.rounds, options.steps, WARM_UP)
        return
    columns = ["rate", "K / C", "strategy", "ms a step", "limit ms", "of the limit", "× DDP", "× plain BSP"]
    table = Table("overlap", __doc__ or "", [*columns, "× BSP", "bytes out / |w|", "note"])
    with Hosts(count=HOSTS, rate=CASES[0][0]) as hosts:
        rate_now, bytes_s = "", 0.0
        for rate, ratio, names in (CASES[case] for case in options.cases):
            if rate != rate_now:
                hosts.set_rate(rate)
                table.note(hosts.describe_link())
                bytes_s, rate_now = min(hosts.probe()), rate
            ring_s = 2 * (HOSTS - 1) / HOSTS * NBYTES / bytes_s
            limit = Limit(ring_s / ratio, ring_s)
            steps = options.steps if ring_s < 1 else 4
            command = [sys.executable, "-m", "benchmarks.overlap", "--worker", ",".join(names)]
            command += [str(limit.compute_s), "--rounds", str(options.rounds), "--steps", str(steps)]
            told = json.loads(hosts.run(command, timeout=1500, echo=False).splitlines()[-1])
            report(table, rate, ratio, names, limit, told)
    table.write()


def report(
    table: Table, rate: str, ratio: float, names: tuple[str, ...], limit: Limit, told: dict[str, Any]
) -> None:
    rows = told["rows"]

    def against(other: str, name: str) -> str:
        if other not in names or other == name:
            return ""
        ratios = [row[other]["step_s"] / row[name]["step_s"] for row in rows]
        return f"{statistics.median(ratios):.3f} ({interval(ratios)})"

    for name in names:
        step_s = statistics.median(row[name]["step_s"] for row in rows)
        sent = statistics.median(row[name]["sent"] for row in rows) / NBYTES
        note = f"{told['late'][name]:.2f} of the bytes late" if name in told["late"] else ""
        if name in ("ssd_sgd", "at_once"):
            note = f"goal {(1 + 1 / DELAY) * (HOSTS - 1) / HOSTS:.3f} |w| ± 3%"
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


if __name__ == "__main__":
    main()
