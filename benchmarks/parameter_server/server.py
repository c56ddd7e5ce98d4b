"""How fast is the parameter server, and what does it gain?

    python -m benchmarks run server

1. wire: one worker, one shard on another host, a model of 40 MB. The fraction of a 1 Gbit/s link that push
   and pull use (goal: 90% of a plain connection), and bytes per second on loopback (goal: 1.5 GB/s).
2. lock step: four workers, each with a shard on the same host. Step time under SSP divided by step time under
   BSP, in the same processes, in turn (goal: at most 1.15).
3. straggler: one of four workers is 4x slower. Samples per second under ASP divided by BSP's (goal: 2.8;
   3.25 if no worker waits), and under SSP(3) compared with its closed form.
4. apply: the server's own work for one push, in passes over memory (goal: 2).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import offbeat
from benchmarks.support.hosts import INTERFACE, Hosts
from benchmarks.support.limits import ring_s
from benchmarks.support.options import benchmark_parser
from benchmarks.support.tables import Table, interval
from benchmarks.support.training import BATCH, PacedTraining
from benchmarks.support.workers import (
    gather_rows,
    run_on_hosts,
    slowest,
    wait_for_listener,
    worker_command,
)
from offbeat.core.pending import block_on
from offbeat.experiments.tasks import task
from offbeat.server.messages import Join, Pull, Push
from offbeat.server.server import ParameterServer
from offbeat.server.sharding import ShardState
from offbeat.worlds.processes.server.discovery import INSECURE

HOSTS = 4
RATE = "1gbit"
WIRE_NUMEL = 10_000_000
SLOWNESS = 4.0
TCP_PORT = 29600


# --- 1. wire


def time_push_and_pull(rounds: int) -> None:
    """Connect one standalone worker to the server; print the seconds of each push and each pull."""
    torch.set_num_threads(1)
    model = nn.Linear(WIRE_NUMEL // 1000 - 1, 1000, bias=True)
    sync = offbeat.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), offbeat.ASP(), timeout_s=60)
    weights = sync._session.conductor.replica.weights
    update, into = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    seconds: list[tuple[float, float]] = []
    for clock in range(1, rounds + 4):
        start = time.perf_counter()
        block_on(_wait(sync.port.server.push(update, clock)))
        pushed = time.perf_counter()
        block_on(_wait(sync.port.server.pull(into, clock)))
        seconds.append((pushed - start, time.perf_counter() - pushed))
    sync.close()
    print(json.dumps(seconds[3:]))


async def _wait(pending: Any) -> None:
    await pending


def measure_rates(
    hosts: Hosts | None, rounds: int, insecure: bool = False, replicate: bool | None = None
) -> tuple[float, float]:
    """Return the median bytes per second of push and of pull; on hosts of their own, or on loopback.

    Connections between hosts are encrypted, unless `insecure`. `replicate`: there are two shards, on two
    hosts, and each keeps a copy of the other or not; None: there is one shard.
    """
    env = {**os.environ, "OFFBEAT_TOKEN": secrets.token_hex(8), "OMP_NUM_THREADS": "1"}
    address = f"{hosts.address(1) if hosts else '127.0.0.1'}:{TCP_PORT}"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "offbeat", "serve", "--snapshots", folder, "--every", "3600"]
        serves = [[*command, "--workers", "1", "--listen", address]]
        if replicate is not None:
            serves[0] += ["--shards", "2", "--here", "1", *(["--replicate"] if replicate else [])]
            serves.append([*command, "--join", address])
        worker = worker_command("server", "--wire", "--rounds", rounds)
        on_host = [
            ["ip", "netns", "exec", hosts.namespace(host)] if hosts else [] for host in range(1 + len(serves))
        ]
        env["GLOO_SOCKET_IFNAME"] = INTERFACE if hosts else "lo"
        env[INSECURE] = "1" if insecure else ""
        servers: list[subprocess.Popen[bytes]] = []
        try:
            for host, serve in enumerate(serves, start=1):
                servers.append(subprocess.Popen([*on_host[host], *serve], env=env, stdout=subprocess.DEVNULL))
                wait_for_listener(address, on_host[0])
            env["OFFBEAT_SERVER"] = address
            done = subprocess.run(
                [*on_host[0], *worker], env=env, capture_output=True, text=True, timeout=300, check=True
            )
            for server in servers:
                server.wait(30)
        finally:
            for server in servers:
                server.kill()
    rows = json.loads(done.stdout.splitlines()[-1])
    push, pull = (4 * WIRE_NUMEL / statistics.median(column) for column in zip(*rows, strict=True))
    return push, pull


# --- 2. lock step and 3. straggler, on 4 hosts


def lock_step(model_name: str, pace_s: float, rounds: int, steps: int) -> None:
    """Train one rank under BSP and under SSP in turn; rank 0 prints the seconds per step of each round."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    trainings = {
        "bsp": PacedTraining(model_name, offbeat.BSP(), pace_s),
        "ssp": PacedTraining(model_name, offbeat.SSP(staleness=3), pace_s),
    }
    rows = []
    for training in trainings.values():
        training.steps(5)
    for round_ in range(rounds):
        row = {}
        for name in sorted(trainings, reverse=bool(round_ % 2)):
            dist.barrier()
            row[name] = slowest(trainings[name].steps(steps))
        rows.append(row)
    for training in trainings.values():
        training.sync.close()
    if dist.get_rank() == 0:
        print(json.dumps(rows))


def straggler(pace_s: float, rounds: int, slow_steps: int) -> None:
    """Measure samples per second on one rank, over the time that the slow worker takes for `slow_steps`."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    slow = dist.get_rank() == HOSTS - 1
    factor = SLOWNESS if slow else 1.0
    strategies: dict[str, Any] = {"bsp": offbeat.BSP(), "asp": offbeat.ASP(), "ssp": offbeat.SSP(staleness=3)}
    rows = []
    for _ in range(rounds):
        row = {}
        for name, strategy in strategies.items():
            training = PacedTraining("mlp", strategy, pace_s, factor)  # a new one: SSP's lead must start at 0
            dist.barrier()
            stop_after = slow_steps if name == "bsp" or slow else None
            own = training.steps_in_time(stop_after, slow_steps * pace_s * SLOWNESS)
            ranks = gather_rows(own)
            training.sync.close()
            slowest_s = ranks[-1][1]
            row[name] = {
                "samples_s": BATCH * sum(steps for steps, _ in ranks) / slowest_s,
                "steps": [int(steps) for steps, _ in ranks],
                "slow_step_s": slowest_s / slow_steps,
            }
        rows.append(row)
    if dist.get_rank() == 0:
        print(json.dumps(rows))


# --- 4. apply


def time_apply(rounds: int = 30) -> tuple[float, float, float]:
    """Return the ms to apply a push of 40 MB, to copy the reply, and to copy 40 MB (one pass over memory)."""
    torch.set_num_threads(1)
    server = ParameterServer(ShardState([torch.zeros(WIRE_NUMEL)]), offbeat.ASP().server_half())
    server.handle(Join(worker=0))
    update, copy, other = ([torch.zeros(WIRE_NUMEL)] for _ in range(3))
    apply_s, reply_s, pass_s = [], [], []
    for clock in range(1, rounds + 1):
        times = [time.perf_counter()]
        server.handle(Push(worker=0, clock=clock, update=update, finite=True))
        times.append(time.perf_counter())
        server.handle(Pull(worker=0, clock=clock))
        torch._foreach_copy_(copy, server.weights)
        times.append(time.perf_counter())
        torch._foreach_copy_(other, update)
        times.append(time.perf_counter())
        for column, (start, end) in zip((apply_s, reply_s, pass_s), itertools.pairwise(times), strict=True):
            column.append(1e3 * (end - start))
    return statistics.median(apply_s), statistics.median(reply_s), statistics.median(pass_s)


def measure_wire(table: Table, rounds: int) -> None:
    """Add the rows of part 1."""
    with Hosts(count=2, rate=RATE) as hosts:
        table.note(hosts.describe_link())
        there, back = hosts.probe()
        push, pull = measure_rates(hosts, rounds)
    for name, rate, limit in (("push", push, there), ("pull", pull, back)):
        used = f"{rate / 1e6:.1f} MB/s, {rate / limit:.3f} of the link"
        table.row("wire", f"{name} of 40 MB at {RATE}", used, "≥ 0.9", f"{limit / 1e6:.1f} MB/s")
    push, pull = measure_rates(None, rounds)
    both = 2 / (1 / push + 1 / pull) / 1e9
    table.row("wire", "push + pull, loopback", f"{both:.2f} GB/s", "≥ 1.5 GB/s", "memory")


def measure_hosts(table: Table, rounds: int) -> None:
    """Add the rows of parts 2 and 3."""
    with Hosts(count=HOSTS, rate=RATE) as hosts:
        table.note(hosts.describe_link())
        bytes_s = min(hosts.probe())
        for model, pace_s in (("mlp", 0.0), ("mlp", 0.1), ("cnn", 0.1)):
            rows = _run(hosts, rounds, "--lock-step", model, pace_s)
            ratios = [row["ssp"] / row["bsp"] for row in rows]
            nbytes = sum(p.nbytes for p in task("fashion-mnist", model=model).build().parameters())
            wire_ms = 1e3 * ring_s(nbytes, HOSTS, bytes_s)
            what = f"{model}, {'paced ' + format(1e3 * pace_s, '.0f') + ' ms' if pace_s else 'unpaced'}"
            ms = [1e3 * statistics.median(row[name] for row in rows) for name in ("bsp", "ssp")]
            result = f"SSP(3)/BSP {statistics.median(ratios):.3f} ({interval(ratios)}), "
            result += f"{ms[1]:.1f} and {ms[0]:.1f} ms"
            limit = f"max(C, K), K = {wire_ms:.1f} ms for both"
            table.row("lock step", what, result, "≤ 1.15", limit)
        pace_s, slow_steps = 0.1, 20
        rows = _run(hosts, max(3, rounds // 4), "--straggler", pace_s, slow_steps)
        for name, goal in (("asp", "≥ 2.8"), ("ssp", "closed form")):
            ratios = [row[name]["samples_s"] / row["bsp"]["samples_s"] for row in rows]
            steps = rows[-1][name]["steps"]
            closed = (3 * min(SLOWNESS, (slow_steps + 3) / slow_steps) + 1) / 4
            limit = (
                "3.25 if no worker waits" if name == "asp" else f"{closed:.3f} by 3·({slow_steps}+3) steps"
            )
            result = f"{name.upper()}/BSP {statistics.median(ratios):.3f} ({interval(ratios)}); steps {steps}"
            table.row("straggler", f"mlp paced {1e3 * pace_s:.0f} ms, one 4x slower", result, goal, limit)


def _run(hosts: Hosts, rounds: int, *worker: object) -> Any:
    return run_on_hosts(hosts, "server", *worker, "--rounds", rounds, timeout=900)


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("server", __doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--wire", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--lock-step", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--straggler", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.wire:
        time_push_and_pull(options.rounds)
    elif options.lock_step:
        lock_step(options.lock_step[0], float(options.lock_step[1]), options.rounds, 15)
    elif options.straggler:
        straggler(float(options.straggler[0]), options.rounds, int(options.straggler[1]))
    else:
        table = Table("server", __doc__ or "", ["question", "case", "result", "goal", "limit"])
        measure_wire(table, options.rounds)
        measure_hosts(table, options.rounds)
        apply, reply, once = time_apply()
        result = f"{(apply + reply) / once:.2f} passes ({apply:.1f} + {reply:.1f} ms; one is {once:.1f} ms)"
        table.row("apply", "a push of 40 MB", result, "≤ 2", "2: the sum, the copy")
        table.write()
