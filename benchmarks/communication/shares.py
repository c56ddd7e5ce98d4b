"""How close do scatter and gather come to the link's rate?

    python -m benchmarks run shares

On four emulated hosts, 40 MB in equal slices: the port's reduce, scatter and gather, and gloo's own
all-gather, in turn and in the same processes. Scatter and gather send (N−1)/N of the bytes, reduce twice
as many.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from benchmarks.support.hosts import Hosts
from benchmarks.support.limits import ring_s
from benchmarks.support.options import benchmark_parser
from benchmarks.support.tables import Table, interval
from benchmarks.support.workers import run_on_hosts
from offbeat.core.pending import Pending
from offbeat.worlds.processes.rendezvous import connect_group

HOSTS = 4
RATES = ("1gbit", "200mbit")
NUMEL = 10_000_000


def work(rounds: int) -> None:
    """Time every collective on one rank; rank 0 prints the seconds."""
    dist.init_process_group("gloo")
    group = dist.new_group()
    port = connect_group(torch.device("cpu"), {}, timeout_s=60)
    flat = torch.ones(NUMEL)
    slices = list(flat.split(NUMEL // port.world))

    def finish(pending: Pending[object]) -> None:
        pending.wait()
        pending.result()

    collectives: dict[str, Callable[[], object]] = {
        "reduce": lambda: finish(port.all_reduce(flat)),
        "scatter": lambda: finish(port.reduce_scatter(slices)),
        "gather": lambda: finish(port.all_gather(slices)),
        "gloo's all-gather": lambda: dist.all_gather(slices, slices[port.rank], group),
    }
    seconds: dict[str, list[float]] = {name: [] for name in collectives}
    for round_ in range(rounds + 1):
        for name, run in collectives.items():
            flat.fill_(1)  # repeated means would become denormal, which is slow
            dist.barrier(group)
            start = time.perf_counter()
            run()
            dist.barrier(group)
            if round_:  # the first round allocates memory and opens connections
                seconds[name].append(time.perf_counter() - start)
    if port.rank == 0:
        print(json.dumps(seconds))
    port.failures.leave(port.operations, "")
    port.failures.wait_for_exit(60)
    port.close()


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("shares", __doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work(options.rounds)
        return
    columns = ["rate", "collective", "ms", "limit ms", "/ reduce", "/ reduce, quartiles"]
    table = Table("shares", __doc__ or "", columns)
    with Hosts(count=HOSTS, rate=RATES[0]) as hosts:
        for rate in RATES:
            hosts.set_rate(rate)
            table.note(hosts.describe_link())
            reduce_s = ring_s(4 * NUMEL, HOSTS, min(hosts.probe()))
            worker = ["--worker", "--rounds", options.rounds]
            seconds = run_on_hosts(hosts, "shares", *worker, timeout=600)
            for name, took in seconds.items():
                ratios = [one / other for one, other in zip(took, seconds["reduce"], strict=True)]
                table.row(
                    rate,
                    name,
                    f"{1000 * statistics.median(took):.1f}",
                    f"{1000 * reduce_s / (1 if name == 'reduce' else 2):.1f}",
                    f"{statistics.median(ratios):.3f}",
                    interval(ratios),
                )
    table.write()
