"""What does elastic=True cost while no worker is lost?

    python -m benchmarks run elastic

Two workers on this machine train the same model plainly and with elastic=True, in the same processes and in
alternating rounds. The table shows the median ratio of the step times. An elastic exchange is reduced in a
copy and committed through the store, some 0.5 ms once per exchange: goal, at most 1.05 for steps of 40 ms.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import offbeat
from benchmarks.support.options import benchmark_parser
from benchmarks.support.tables import Table, interval
from benchmarks.support.training import random_batch, train_step
from offbeat.experiments.tasks import task
from offbeat.worlds.processes.emulation import pace
from offbeat.worlds.processes.launcher import launch

WORKERS = 2
STRATEGIES = {"bsp": offbeat.BSP(), "local_sgd": offbeat.LocalSGD(period=8)}
PACES_S = (0.0, 0.04)
MODEL = "mlp"


def work(name: str, pace_s: float, rounds: int, steps: int, out: Path) -> None:
    """Train one rank in alternating rounds, plainly and elastically; rank 0 writes the mean step times."""
    torch.set_num_threads(1)
    what = task("fashion-mnist", model=MODEL)
    contenders: dict[str, tuple[Any, Any, Any]] = {}
    for kind in ("plain", "elastic"):  # the plain one makes the process group, whose store the other uses
        torch.manual_seed(0)
        model = what.build()
        if pace_s:
            pace(model, pace_s)
        optimizer = what.optimizer(model)
        sync = offbeat.attach(model, optimizer, STRATEGIES[name], elastic=kind == "elastic")
        contenders[kind] = model, optimizer, sync
    batch = random_batch()
    rows = []
    for round_ in range(rounds + 1):
        row = {}
        for kind in sorted(contenders, reverse=bool(round_ % 2)):
            model, optimizer, _ = contenders[kind]
            dist.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                train_step(model, optimizer, *batch)
            row[kind] = (time.perf_counter() - start) / steps
        rows.append(row)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(rows[1:]))  # without the first, which warms up
    for kind in ("elastic", "plain"):
        contenders[kind][2].close()


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("elastic", __doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=24, help="steps per round")
    options = parser.parse_args(arguments)
    table = Table(
        "elastic",
        __doc__ or "",
        ["strategy", "computation", "plain ms", "elastic ms", "elastic / plain", "by round", "goal"],
    )
    nbytes = sum(p.nbytes for p in task("fashion-mnist", model=MODEL).build().parameters())
    table.note(f"{WORKERS} workers over loopback, a model of {nbytes / 1e6:.2f} MB")
    with tempfile.TemporaryDirectory() as folder:
        for name in STRATEGIES:
            for pace_s in PACES_S:
                out = Path(folder) / f"{name}-{pace_s}.json"
                launch(WORKERS, work, name, pace_s, options.rounds, options.steps, out)
                rows = json.loads(out.read_text())
                plain, elastic = ([row[kind] for row in rows] for kind in ("plain", "elastic"))
                ratios = [e / p for p, e in zip(plain, elastic, strict=True)]
                table.row(
                    name,
                    f"paced {1000 * pace_s:.0f} ms" if pace_s else "unpaced",
                    f"{1000 * statistics.median(plain):.2f}",
                    f"{1000 * statistics.median(elastic):.2f}",
                    f"{statistics.median(ratios):.3f}",
                    interval(ratios),
                    "≤ 1.05" if pace_s else "–",
                )
    table.write()
