"""Does BSP keep up with torch's DDP?

    python -m benchmarks.bsp_vs_ddp

On 4 shaped hosts, the same model under DDP and under attach(BSP) in the same processes, in alternating
rounds; the ratio of the two medians, for each model and rate. The goal is at most 1.03.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from benchmarks.hosts import Hosts
from benchmarks.tables import Table, interval
from offbeat.experiments.tasks import task
from offbeat.worlds.processes.emulation import pace

HOSTS = 4
RATES = ("1gbit", "200mbit")
MODELS = ("mlp", "cnn")
BATCH = 32


def steps_of(
    model: nn.Module, wrapped: nn.Module, optimizer: torch.optim.Optimizer, count: int
) -> list[float]:
    """Seconds of each step of an ordinary loop."""
    x, y = torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    return seconds


def work(model_name: str, pace_s: float, rounds: int, steps: int) -> None:
    """One rank: rounds of both, in turn; rank 0 prints the medians of each round."""
    dist.init_process_group("gloo")
    what = task("fashion-mnist", model=model_name)
    contenders = []
    for _ in range(2):
        torch.manual_seed(0)
        model = what.build()
        if pace_s:
            pace(model, pace_s)
        contenders.append((model, what.optimizer(model)))
    (theirs, their_optimizer), (ours, our_optimizer) = contenders
    ddp = DistributedDataParallel(theirs)
    rows = []
    with offbeat.attach(ours, our_optimizer, offbeat.BSP()):
        steps_of(theirs, ddp, their_optimizer, 5)
        steps_of(ours, ours, our_optimizer, 5)
        for round_ in range(rounds):
            turns = [("ddp", theirs, ddp, their_optimizer), ("bsp", ours, ours, our_optimizer)]
            if round_ % 2:
                turns.reverse()
            row = {}
            for name, model, wrapped, optimizer in turns:
                dist.barrier()
                row[name] = statistics.mean(steps_of(model, wrapped, optimizer, steps))
            rows.append(row)
    if dist.get_rank() == 0:
        print(json.dumps(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--worker", nargs=2, metavar=("MODEL", "PACE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker[0], float(options.worker[1]), options.rounds, options.steps)
        return
    table = Table(
        "bsp-vs-ddp",
        __doc__ or "",
        ["rate", "model", "computation", "DDP ms", "BSP ms", "BSP / DDP", "by round", "goal"],
    )
    with Hosts(count=HOSTS, rate=RATES[0]) as hosts:
        for rate in RATES:
            hosts.set_rate(rate)
            table.note(hosts.describe_link())
            bytes_per_s = min(hosts.probe())
            for model in MODELS:
                nbytes = sum(p.nbytes for p in task("fashion-mnist", model=model).build().parameters())
                wire_s = 2 * (HOSTS - 1) / HOSTS * nbytes / bytes_per_s
                table.note(
                    f"limit for {model} at {rate}: a ring all-reduce of its {nbytes / 1e6:.2f} MB takes K = "
                    f"{1e3 * wire_s:.1f} ms; with C of computation no step is shorter than max(C, K)"
                )
                for pace_s in (0.0, 0.06):
                    command = [sys.executable, "-m", "benchmarks.bsp_vs_ddp", "--worker", model, str(pace_s)]
                    command += ["--rounds", str(options.rounds), "--steps", str(options.steps)]
                    rows = json.loads(hosts.run(command, timeout=600, echo=False).splitlines()[-1])
                    ddp, bsp = ([row[name] for row in rows] for name in ("ddp", "bsp"))
                    ratios = [b / d for d, b in zip(ddp, bsp, strict=True)]
                    table.row(
                        rate,
                        model,
                        f"paced {1000 * pace_s:.0f} ms" if pace_s else "unpaced",
                        f"{1000 * statistics.median(ddp):.1f}",
                        f"{1000 * statistics.median(bsp):.1f}",
                        f"{statistics.median(ratios):.3f}",
                        interval(ratios),
                        "≤ 1.03",
                    )
    table.write()


if __name__ == "__main__":
    main()
