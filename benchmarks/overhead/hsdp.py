"""Is BSP between sharded replicas as fast as torch's HSDP (hybrid sharding)?

    python -m benchmarks run hsdp

Two emulated hosts with two ranks each. A host's ranks shard a model by FSDP2; gradients are averaged between
the hosts: by torch (fully_shard with a mesh of two dimensions), or by attach(BSP, group=…). Both train in the
same processes, in alternating rounds. The table shows the median ratio of the step times.
Goal: at most 1.03.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import offbeat
from benchmarks.overhead.bsp_vs_ddp import time_steps
from benchmarks.support.hosts import Hosts
from benchmarks.support.options import benchmark_parser
from benchmarks.support.tables import Table, interval
from benchmarks.support.workers import run_on_hosts, worker_command
from offbeat.experiments.tasks import task
from offbeat.worlds.processes.emulation import pace

HOSTS, RANKS = 2, 2  # ranks per host
RATE = "1gbit"
MODELS = ("mlp", "cnn")


def build(model_name: str, pace_s: float, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build a model, each layer sharded over the mesh, and its optimizer."""
    torch.manual_seed(0)
    what = task("fashion-mnist", model=model_name)
    model = what.build()
    for layer in [m for m in model.modules() if not list(m.children()) and list(m.parameters())]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if pace_s:
        pace(model, pace_s)
    return model, what.optimizer(model)


def work(model_name: str, pace_s: float, rounds: int, steps: int) -> None:
    """Train one rank in alternating rounds of HSDP and BSP; rank 0 prints the mean step times."""
    mesh = init_device_mesh("cpu", (HOSTS, RANKS), mesh_dim_names=("replica", "shard"))
    theirs, their_optimizer = build(model_name, pace_s, mesh)
    ours, our_optimizer = build(model_name, pace_s, mesh["shard"])
    rows = []
    with offbeat.attach(ours, our_optimizer, offbeat.BSP(), group=mesh["replica"]):
        time_steps(theirs, their_optimizer, 5)
        time_steps(ours, our_optimizer, 5)
        for round_ in range(rounds):
            turns = [("hsdp", theirs, their_optimizer), ("bsp", ours, our_optimizer)]
            if round_ % 2:
                turns.reverse()
            row = {}
            for name, model, optimizer in turns:
                dist.barrier()
                row[name] = time_steps(model, optimizer, steps)
            rows.append(row)
    if dist.get_rank() == 0:
        print(json.dumps(rows))


def work_on_host(options: argparse.Namespace) -> None:
    """Start this host's other rank, and be its first one."""
    host = int(os.environ["RANK"])
    os.environ["WORLD_SIZE"] = str(HOSTS * RANKS)
    settings = ["--rounds", options.rounds, "--steps", options.steps]
    command = worker_command("hsdp", "--worker", *options.worker, *settings, "--local")
    other = subprocess.Popen(command, env={**os.environ, "RANK": str(RANKS * host + 1), "LOCAL_RANK": "1"})
    os.environ["RANK"] = str(RANKS * host)
    work(options.worker[0], float(options.worker[1]), options.rounds, options.steps)
    if other.wait():
        raise SystemExit(f"the second rank of host {host} failed")


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("hsdp", __doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20, help="steps per round")
    parser.add_argument("--worker", nargs=2, metavar=("MODEL", "PACE"), help=argparse.SUPPRESS)
    parser.add_argument("--local", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker and options.local:
        work(options.worker[0], float(options.worker[1]), options.rounds, options.steps)
        return
    if options.worker:
        work_on_host(options)
        return
    table = Table(
        "hsdp",
        __doc__ or "",
        ["rate", "model", "computation", "HSDP ms", "BSP ms", "BSP / HSDP", "by round", "goal"],
    )
    with Hosts(count=HOSTS, rate=RATE) as hosts:
        table.note(hosts.describe_link())
        for model in MODELS:
            for pace_s in (0.0, 0.06):
                settings = ["--rounds", options.rounds, "--steps", options.steps]
                worker = ["--worker", model, pace_s, *settings]
                rows = run_on_hosts(hosts, "hsdp", *worker, timeout=600)
                hsdp, bsp = ([row[name] for row in rows] for name in ("hsdp", "bsp"))
                ratios = [b / h for h, b in zip(hsdp, bsp, strict=True)]
                table.row(
                    RATE,
                    model,
                    f"paced {1000 * pace_s:.0f} ms" if pace_s else "unpaced",
                    f"{1000 * statistics.median(hsdp):.1f}",
                    f"{1000 * statistics.median(bsp):.1f}",
                    f"{statistics.median(ratios):.3f}",
                    interval(ratios),
                    "≤ 1.03",
                )
    table.write()
