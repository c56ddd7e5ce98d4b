"""How close do scatter and gather come to the wire?

    python -m benchmarks.shares

On 4 shaped hosts, 40 MB in even shares: the port's reduce, scatter and gather, and gloo's own all-gather, in
turn in the same processes. On the wire a share's exchange takes (N−1)/N of the bytes, a reduce twice that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.hosts import Hosts
from benchmarks.tables import Table, interval
from offbeat.core.pending import Pending
from offbeat.worlds.processes.rendezvous import connect_group

HOSTS = 4
RATES = ("1gbit", "200mbit")
NUMEL = 10_000_000


def work(rounds: int) -> None:
    """One rank; rank 0 prints every contender's seconds."""
    dist.init_process_group("gloo")
    group = dist.new_group()
    port = connect_group(torch.device("cpu"), {}, timeout_s=60)
    flat = torch.ones(NUMEL)
    shares = list(flat.split(NUMEL // port.world))

    def ended(pending: Pending[object]) -> None:
        pending.wait()
        pending.result()

    contenders: dict[str, Callable[[], object]] = {
        "reduce": lambda: ended(port.all_reduce(flat)),
        "scatter": lambda: ended(port.reduce_scatter(shares)),
        "gather": lambda: ended(port.all_gather(shares)),
        "gloo's all-gather": lambda: dist.all_gather(shares, shares[port.rank], group),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(rounds + 1):
        for name, run in contenders.items():
            flat.fill_(1)  # or means of means become too small for fast arithmetic
            dist.barrier(group)
            began = time.perf_counter()
            run()
            dist.barrier(group)
            if round_:  # the first takes memory and opens connections
                seconds[name].append(time.perf_counter() - began)
    if port.rank == 0:
        print(json.dumps(seconds))
    port.failures.leave(port.operations, "")
    port.failures.wait_for_exit(60)
    port.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.rounds)
        return
    table = Table("shares", __doc__ or "", ["rate", "what", "ms", "wire allows ms", "of reduce", "by round"])
    with Hosts(count=HOSTS, rate=RATES[0]) as hosts:
        for rate in RATES:
            hosts.set_rate(rate)
            table.note(hosts.describe_link())
            wire_s = (HOSTS - 1) / HOSTS * 4 * NUMEL / min(hosts.probe())
            command = [sys.executable, "-m", "benchmarks.shares", "--worker", "--rounds", str(options.rounds)]
            seconds = json.loads(hosts.run(command, timeout=600, echo=False).splitlines()[-1])
            for name, took in seconds.items():
                ratios = [one / other for one, other in zip(took, seconds["reduce"], strict=True)]
                table.row(
                    rate,
                    name,
                    f"{1000 * statistics.median(took):.1f}",
                    f"{1000 * wire_s * (2 if name == 'reduce' else 1):.1f}",
                    f"{statistics.median(ratios):.3f}",
                    interval(ratios),
                )
    table.write()


if __name__ == "__main__":
    main()
