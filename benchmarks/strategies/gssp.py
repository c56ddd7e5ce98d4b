"""How much faster are groups of like speed, and how much less do they send with GDTopK?

    python -m benchmarks.gssp

4 hosts at 1 Gbit/s, a shard of the server beside each; the MLP, its computation paced to 100 ms a step on two
of them, 200 on the third and 400 on the fourth. Each strategy in turn, interleaved, over the time of some of
the slowest one's steps, once it has settled (GSSP has found its groups by then): samples a second of all
workers, against BSP's (goal: 2.2; 2.75 is the sum of all speeds) and SSP's (goal: 1.46), and bytes a step,
against GSSP's (goal: half).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import offbeat
from benchmarks.hosts import Hosts
from benchmarks.server import BATCH, Contender
from benchmarks.tables import Table, interval

RATE = "1gbit"
PACE_S = 0.1
SLOWNESS = (1.0, 1.0, 2.0, 4.0)
WINDOW = 4
SETTLING = WINDOW + 2  # steps of every worker
EPOCH_STEPS = 8


def strategies() -> dict[str, Any]:
    return {
        "bsp": offbeat.BSP(),
        "ssp": offbeat.SSP(staleness=3),
        "gssp": offbeat.GSSP(staleness=3, window=WINDOW),
        "gdtopk": offbeat.GSSP(
            staleness=3, window=WINDOW, sparse=offbeat.GDTopK(epoch_steps=EPOCH_STEPS, more="slow")
        ),
    }


def race(rounds: int, slow_steps: int) -> None:
    """One rank's part: steps, seconds and bytes of all, for each strategy in each round."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    rows = []
    for round_ in range(rounds):
        row = {}
        names = list(strategies())
        for name in reversed(names) if round_ % 2 else names:
            contender = Contender("mlp", strategies()[name], PACE_S, SLOWNESS[rank])
            contender.steps(SETTLING)
            before = contender.sync.metrics.bytes_sent
            dist.barrier()
            began, steps = time.perf_counter(), 0
            enough_s = slow_steps * PACE_S * max(SLOWNESS)
            sets_the_end = name == "bsp" or SLOWNESS[rank] == max(SLOWNESS)
            while steps < slow_steps if sets_the_end else time.perf_counter() - began < enough_s:
                contender.step()
                steps += 1
            nbytes = contender.sync.metrics.bytes_sent - before
            mine = torch.tensor([steps, time.perf_counter() - began, nbytes], dtype=torch.float64)
            everybody = [torch.zeros_like(mine) for _ in SLOWNESS]
            dist.all_gather(everybody, mine)
            contender.sync.close()
            row[name] = [each.tolist() for each in everybody]
        rows.append(row)
    if rank == 0:
        print(json.dumps(rows))


def samples_s(everybody: list[list[float]]) -> float:
    return BATCH * sum(steps for steps, _, _ in everybody) / everybody[-1][1]


def bytes_a_step(everybody: list[list[float]]) -> float:
    return sum(nbytes for _, _, nbytes in everybody) / sum(steps for steps, _, _ in everybody)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--slow-steps", type=int, default=20)
    parser.add_argument("--race", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.race:
        race(options.rounds, options.slow_steps)
        return
    table = Table("gssp", __doc__ or "", ["what", "result", "goal", "limit"])
    with Hosts(count=len(SLOWNESS), rate=RATE) as hosts:
        table.note(hosts.describe_link())
        command = [sys.executable, "-m", "benchmarks.gssp", "--race", "--rounds", str(options.rounds)]
        command += ["--slow-steps", str(options.slow_steps)]
        rows = json.loads(hosts.run(command, timeout=900, echo=False).splitlines()[-1])
    for name in strategies():
        steps = [int(steps) for steps, _, _ in rows[-1][name]]
        rate = statistics.median(samples_s(row[name]) for row in rows)
        mb = statistics.median(bytes_a_step(row[name]) for row in rows) / 1e6
        table.note(f"{name}: {rate:.0f} samples/s, {mb:.2f} MB a step; steps of each worker {steps}")
    speeds = sum(1 / slowness for slowness in SLOWNESS) * max(SLOWNESS) / len(SLOWNESS)
    ahead = (3 * min(max(SLOWNESS), 1 + 3 / options.slow_steps) + 1) / 4  # SSP's lead, over this stretch
    for name, other, goal, limit in (
        ("gssp", "bsp", "≥ 2.2", f"{speeds:.2f}: nobody waits"),
        ("gssp", "ssp", "≥ 1.46", f"{speeds / ahead:.2f}: SSP gains its lead of 3 in this stretch"),
        ("gdtopk", "bsp", "≥ 2.2", f"{speeds:.2f}"),
        ("ssp", "bsp", "none", f"{ahead:.2f}"),
    ):
        ratios = [samples_s(row[name]) / samples_s(row[other]) for row in rows]
        said = f"{statistics.median(ratios):.3f} ({interval(ratios)})"
        table.row(f"samples/s, {name} to {other}", said, goal, limit)
    ratios = [bytes_a_step(row["gdtopk"]) / bytes_a_step(row["gssp"]) for row in rows]
    table.row(
        "bytes a step, gdtopk to gssp",
        f"{statistics.median(ratios):.3f} ({interval(ratios)})",
        "≤ 0.5",
        "0.25: answers in half precision, and no pushes",
    )
    table.write()


if __name__ == "__main__":
    main()
