"""What does a copy of each shard cost?

    python -m benchmarks run replication

One worker pushes a model of 40 MB to two shards and pulls it back; with `--replicate` each shard keeps a copy
of the other, and acknowledges a push when the copy has it. On hosts at 1 Gbit/s the copy of a push travels
from shard to shard after the push itself, so a push takes about twice as long, and a pull as long as before.
Without and with copies in turn.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from benchmarks.parameter_server.server import RATE, measure_rates
from benchmarks.support.hosts import Hosts
from benchmarks.support.options import benchmark_parser
from benchmarks.support.tables import Table, interval


def measure(table: Table, hosts: Hosts | None, repeats: int, rounds: int) -> None:
    """Add the rows of one network: pairs of runs, without and with copies, the order in turn."""
    rates: dict[tuple[str, bool], list[float]] = {}
    for repeat in range(repeats):
        for replicate in (True, False) if repeat % 2 else (False, True):
            measured = measure_rates(hosts, rounds, replicate=replicate)
            for name, rate in zip(("push", "pull"), measured, strict=True):
                rates.setdefault((name, replicate), []).append(rate)
    where = f"at {RATE}" if hosts else "on loopback"
    for name in ("push", "pull"):
        single, copied = (rates[name, replicate] for replicate in (False, True))
        ratios = [with_copy / without for without, with_copy in zip(single, copied, strict=True)]
        spread = f" ({interval(ratios)})" if len(ratios) > 1 else ""
        mb_s = [f"{statistics.median(values) / 1e6:.1f} MB/s" for values in (single, copied)]
        table.row(f"{name} of 40 MB {where}", *mb_s, f"{statistics.median(ratios):.2f}{spread}")


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("replication", __doc__)
    parser.add_argument("--repeats", type=int, default=3, help="pairs of runs")
    parser.add_argument("--rounds", type=int, default=8, help="pushes and pulls of a run")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    table = Table("replication", __doc__ or "", ["case", "one copy", "two copies", "two / one"])
    with Hosts(count=3, rate=RATE) as hosts:
        table.note(hosts.describe_link())
        measure(table, hosts, options.repeats, options.rounds)
    measure(table, None, options.repeats, options.rounds)
    table.write()
