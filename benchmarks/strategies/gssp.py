"""How much faster is GSSP with workers of different speeds, and how much less does GDTopK send?

    python -m benchmarks run gssp

Four hosts at 1 Gbit/s, each with a worker and a shard of the server; the MLP, paced to 100 ms per step on two
of them, 200 on the third and 400 on the fourth. The strategies train in turn, each for the time that the
slowest worker takes for some steps, after a warm-up in which GSSP finds its groups. Figures: samples per
second of all workers, divided by BSP's (goal: 2.2; 2.75 is the sum of all speeds) and SSP's (goal: 1.46), and
bytes per step, divided by GSSP's (goal: half).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import offbeat
from benchmarks.support.hosts import Hosts
from benchmarks.support.options import benchmark_parser
from benchmarks.support.tables import Table, interval
from benchmarks.support.training import BATCH, PacedTraining
from benchmarks.support.workers import gather_rows, run_on_hosts

RATE = "1gbit"
PACE_S = 0.1
SLOWNESS = (1.0, 1.0, 2.0, 4.0)
WINDOW = 4
WARM_UP = WINDOW + 2  # steps of every worker
EPOCH_STEPS = 8


def strategies() -> dict[str, Any]:
    """Return new strategies to compare, by name."""
    return {
        "bsp": offbeat.BSP(),
        "ssp": offbeat.SSP(staleness=3),
        "gssp": offbeat.GSSP(staleness=3, window=WINDOW),
        "gdtopk": offbeat.GSSP(
            staleness=3, window=WINDOW, sparse=offbeat.GDTopK(epoch_steps=EPOCH_STEPS, more="slow")
        ),
    }


def work(rounds: int, slow_steps: int) -> None:
    """Train one rank under every strategy in turn; rank 0 prints steps, seconds and bytes of all ranks."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    rows = []
    for round_ in range(rounds):
        row = {}
        names = list(strategies())
        for name in reversed(names) if round_ % 2 else names:
            training = PacedTraining("mlp", strategies()[name], PACE_S, SLOWNESS[rank])
            training.steps(WARM_UP)
            before = training.sync.metrics.bytes_sent
            dist.barrier()
            counts_steps = name == "bsp" or SLOWNESS[rank] == max(SLOWNESS)
            stop_after = slow_steps if counts_steps else None
            steps, seconds = training.steps_in_time(stop_after, slow_steps * PACE_S * max(SLOWNESS))
            row[name] = gather_rows([steps, seconds, training.sync.metrics.bytes_sent - before])
            training.sync.close()
        rows.append(row)
    if rank == 0:
        print(json.dumps(rows))


def samples_s(ranks: list[list[float]]) -> float:
    """Return the samples per second of all ranks."""
    return BATCH * sum(steps for steps, _, _ in ranks) / ranks[-1][1]


def bytes_per_step(ranks: list[list[float]]) -> float:
    """Return the bytes sent per step, averaged over all ranks."""
    return sum(nbytes for _, _, nbytes in ranks) / sum(steps for steps, _, _ in ranks)


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("gssp", __doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--slow-steps", type=int, default=20, help="steps of the slowest worker per turn")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work(options.rounds, options.slow_steps)
        return
    table = Table("gssp", __doc__ or "", ["figure", "result", "goal", "limit"])
    with Hosts(count=len(SLOWNESS), rate=RATE) as hosts:
        table.note(hosts.describe_link())
        worker = ["--worker", "--rounds", options.rounds, "--slow-steps", options.slow_steps]
        rows = run_on_hosts(hosts, "gssp", *worker, timeout=900)
    for name in strategies():
        steps = [int(steps) for steps, _, _ in rows[-1][name]]
        rate = statistics.median(samples_s(row[name]) for row in rows)
        mb = statistics.median(bytes_per_step(row[name]) for row in rows) / 1e6
        table.note(f"{name}: {rate:.0f} samples/s, {mb:.2f} MB per step; steps of each worker {steps}")
    speeds = sum(1 / slowness for slowness in SLOWNESS) * max(SLOWNESS) / len(SLOWNESS)
    ahead = (3 * min(max(SLOWNESS), 1 + 3 / options.slow_steps) + 1) / 4  # with SSP's lead of 3 steps
    for name, other, goal, limit in (
        ("gssp", "bsp", "≥ 2.2", f"{speeds:.2f}: no worker waits"),
        ("gssp", "ssp", "≥ 1.46", f"{speeds / ahead:.2f}: SSP gains its lead of 3 steps in this time"),
        ("gdtopk", "bsp", "≥ 2.2", f"{speeds:.2f}"),
        ("ssp", "bsp", "none", f"{ahead:.2f}"),
    ):
        ratios = [samples_s(row[name]) / samples_s(row[other]) for row in rows]
        result = f"{statistics.median(ratios):.3f} ({interval(ratios)})"
        table.row(f"samples/s, {name} / {other}", result, goal, limit)
    ratios = [bytes_per_step(row["gdtopk"]) / bytes_per_step(row["gssp"]) for row in rows]
    table.row(
        "bytes per step, gdtopk / gssp",
        f"{statistics.median(ratios):.3f} ({interval(ratios)})",
        "≤ 0.5",
        "0.25: replies in half precision, no pushes",
    )
    table.write()
