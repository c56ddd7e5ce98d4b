"""What does the parameter server cost, and what does it give?

    python -m benchmarks.server

1. wire: one worker, one shard on another host, a model of 40 MB: which part of the link push and pull use,
   each in its direction, at 1 Gbit/s (goal: 90% of what a plain connection gets); and on loopback, bytes a
   second (goal: 1.5 GB/s).
2. lock step: 4 workers with 4 shards beside them: SSP's step against BSP's all-reduce step, in the same
   processes, in turn (goal: at most 1.15).
3. straggler: one of 4 workers computes four times slower: samples a second under ASP against BSP (goal: 2.8;
   without any waiting 3.25), and under SSP(3) against its closed form.
4. folding: the server's own work on a push, in passes over memory (goal: 2).
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
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import offbeat
from benchmarks.hosts import CARD, Hosts
from benchmarks.tables import Table, interval
from offbeat.core.pending import block_on
from offbeat.experiments.tasks import task
from offbeat.server.messages import Join, Pull, Push
from offbeat.server.server import ParameterServer
from offbeat.server.sharding import ShardState
from offbeat.worlds.processes.emulation import pace

HOSTS = 4
RATE = "1gbit"
WIRE_NUMEL = 10_000_000
BATCH = 32
SLOWNESS = 4.0
PORT = 29600


# --- 1. wire


def wire(rounds: int) -> None:
    """A worker that came by itself: seconds of each push, and of each pull."""
    torch.set_num_threads(1)
    model = nn.Linear(WIRE_NUMEL // 1000 - 1, 1000, bias=True)
    sync = offbeat.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), offbeat.ASP(), timeout_s=60)
    weights = sync._session.conductor.replica.weights
    update, into = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    seconds: list[tuple[float, float]] = []
    for clock in range(1, rounds + 4):
        began = time.perf_counter()
        block_on(_awaited(sync.port.server.push(update, clock)))
        pushed = time.perf_counter()
        block_on(_awaited(sync.port.server.pull(into, clock)))
        seconds.append((pushed - began, time.perf_counter() - pushed))
    sync.close()
    print(json.dumps(seconds[3:]))


async def _awaited(pending: Any) -> None:
    await pending


def served_wire(hosts: Hosts | None, rounds: int) -> tuple[float, float]:
    """Bytes a second of push and of pull, the medians; on two hosts, or on loopback."""
    env = {**os.environ, "OFFBEAT_TOKEN": secrets.token_hex(8), "OMP_NUM_THREADS": "1"}
    address = f"{hosts.address(1) if hosts else '127.0.0.1'}:{PORT}"
    with tempfile.TemporaryDirectory() as folder:
        serve = [sys.executable, "-m", "offbeat", "serve", "--workers", "1", "--listen", address]
        serve += ["--snapshots", folder, "--every", "3600"]
        worker = [sys.executable, "-m", "benchmarks.server", "--wire", "--rounds", str(rounds)]
        there = ["ip", "netns", "exec"]
        if hosts:
            env["GLOO_SOCKET_IFNAME"] = CARD
            serve, worker = [*there, hosts.namespace(1), *serve], [*there, hosts.namespace(0), *worker]
        else:
            env["GLOO_SOCKET_IFNAME"] = "lo"
        server = subprocess.Popen(serve, env=env, stdout=subprocess.DEVNULL)
        try:
            env["OFFBEAT_SERVER"] = address
            _await_listener(hosts, address)
            done = subprocess.run(worker, env=env, capture_output=True, text=True, timeout=300, check=True)
            server.wait(30)
        finally:
            server.kill()
    rows = json.loads(done.stdout.splitlines()[-1])
    push, pull = (4 * WIRE_NUMEL / statistics.median(column) for column in zip(*rows, strict=True))
    return push, pull


def _await_listener(hosts: Hosts | None, address: str) -> None:
    """Until something listens there."""
    host, port = address.split(":")
    probe = f"import socket; socket.create_connection(({host!r}, {port}), 1).close()"
    command = [sys.executable, "-c", probe]
    if hosts:
        command = ["ip", "netns", "exec", hosts.namespace(0), *command]
    for _ in range(300):
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return
        time.sleep(0.1)
    raise TimeoutError(f"nothing listens at {address}")


# --- 2. lock step and 3. straggler, on 4 hosts


class Contender:
    """A model under a strategy, and seconds of its steps."""

    def __init__(self, model_name: str, strategy: Any, pace_s: float, factor: float = 1.0) -> None:
        torch.manual_seed(0)
        what = task("fashion-mnist", model=model_name)
        self.model = what.build()
        self.optimizer = what.optimizer(self.model)
        self.sync = offbeat.attach(self.model, self.optimizer, strategy, timeout_s=120)
        if pace_s:
            pace(self.model, pace_s, factor=factor)
        self.batch = torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))

    def step(self) -> None:
        x, y = self.batch
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()

    def steps(self, count: int) -> float:
        """Seconds a step; what is under way in the end is waited for, so it counts."""
        began = time.perf_counter()
        for _ in range(count):
            self.step()
        self.sync.settle()
        return (time.perf_counter() - began) / count


def lock_step(model_name: str, pace_s: float, rounds: int, steps: int) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    contenders = {
        "bsp": Contender(model_name, offbeat.BSP(), pace_s),
        "ssp": Contender(model_name, offbeat.SSP(staleness=3), pace_s),
    }
    rows = []
    for contender in contenders.values():
        contender.steps(5)
    for round_ in range(rounds):
        row = {}
        for name in sorted(contenders, reverse=bool(round_ % 2)):
            dist.barrier()
            mine = torch.tensor([contenders[name].steps(steps)])
            dist.all_reduce(mine, dist.ReduceOp.MAX)
            row[name] = mine.item()
        rows.append(row)
    for contender in contenders.values():
        contender.sync.close()
    if dist.get_rank() == 0:
        print(json.dumps(rows))


def straggler(pace_s: float, rounds: int, slow_steps: int) -> None:
    """Samples a second of all, each in turn over the time of `slow_steps` of the slow one's steps."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    slow = dist.get_rank() == HOSTS - 1
    factor = SLOWNESS if slow else 1.0
    strategies: dict[str, Any] = {"bsp": offbeat.BSP(), "asp": offbeat.ASP(), "ssp": offbeat.SSP(staleness=3)}
    rows = []
    for _ in range(rounds):
        row = {}
        for name, strategy in strategies.items():
            contender = Contender("mlp", strategy, pace_s, factor)  # anew: SSP's lead must start at 0
            dist.barrier()
            began, steps = time.perf_counter(), 0
            enough_s = slow_steps * pace_s * SLOWNESS
            while steps < slow_steps if name == "bsp" or slow else time.perf_counter() - began < enough_s:
                contender.step()
                steps += 1
            mine = torch.tensor([float(steps), time.perf_counter() - began], dtype=torch.float64)
            everybody = [torch.zeros_like(mine) for _ in range(HOSTS)]
            dist.all_gather(everybody, mine)
            contender.sync.close()
            slowest_s = everybody[-1][1].item()
            row[name] = {
                "samples_s": BATCH * sum(each[0].item() for each in everybody) / slowest_s,
                "steps": [int(each[0].item()) for each in everybody],
                "slow_step_s": slowest_s / slow_steps,
            }
        rows.append(row)
    if dist.get_rank() == 0:
        print(json.dumps(rows))


# --- 4. folding


def folding(rounds: int = 30) -> tuple[float, float, float]:
    """Milliseconds of folding a push of 40 MB, of copying the answer, and of one pass: copying as much."""
    torch.set_num_threads(1)
    server = ParameterServer(ShardState([torch.zeros(WIRE_NUMEL)]), offbeat.ASP().server_half())
    server.handle(Join(worker=0))
    update, copy, other = ([torch.zeros(WIRE_NUMEL)] for _ in range(3))
    fold_s, reply_s, pass_s = [], [], []
    for clock in range(1, rounds + 1):
        times = [time.perf_counter()]
        server.handle(Push(worker=0, clock=clock, update=update, finite=True))
        times.append(time.perf_counter())
        server.handle(Pull(worker=0, clock=clock))
        torch._foreach_copy_(copy, server.weights)
        times.append(time.perf_counter())
        torch._foreach_copy_(other, update)
        times.append(time.perf_counter())
        for column, (start, end) in zip((fold_s, reply_s, pass_s), itertools.pairwise(times), strict=True):
            column.append(1e3 * (end - start))
    return statistics.median(fold_s), statistics.median(reply_s), statistics.median(pass_s)


def measure_wire(table: Table, rounds: int) -> None:
    with Hosts(count=2, rate=RATE) as hosts:
        table.note(hosts.describe_link())
        there, back = hosts.probe()
        push, pull = served_wire(hosts, rounds)
    for name, rate, limit in (("push", push, there), ("pull", pull, back)):
        share = f"{rate / 1e6:.1f} MB/s, {rate / limit:.3f} of the link"
        table.row("wire", f"{name} of 40 MB at {RATE}", share, "≥ 0.9", f"{limit / 1e6:.1f} MB/s")
    push, pull = served_wire(None, rounds)
    both = 2 / (1 / push + 1 / pull) / 1e9
    table.row("wire", "push + pull, loopback", f"{both:.2f} GB/s", "≥ 1.5 GB/s", "memory")


def measure_hosts(table: Table, rounds: int) -> None:
    with Hosts(count=HOSTS, rate=RATE) as hosts:
        table.note(hosts.describe_link())
        bytes_s = min(hosts.probe())
        for model, pace_s in (("mlp", 0.0), ("mlp", 0.1), ("cnn", 0.1)):
            rows = _run(hosts, ["--lock-step", model, str(pace_s)], rounds)
            ratios = [row["ssp"] / row["bsp"] for row in rows]
            nbytes = sum(p.nbytes for p in task("fashion-mnist", model=model).build().parameters())
            wire_ms = 2e3 * (HOSTS - 1) / HOSTS * nbytes / bytes_s
            what = f"{model}, {'paced ' + format(1e3 * pace_s, '.0f') + ' ms' if pace_s else 'unpaced'}"
            ms = [1e3 * statistics.median(row[name] for row in rows) for name in ("bsp", "ssp")]
            said = f"SSP(3)/BSP {statistics.median(ratios):.3f} ({interval(ratios)}), "
            said += f"{ms[1]:.1f} and {ms[0]:.1f} ms"
            limit = f"max(C, K), K = {wire_ms:.1f} ms for both"
            table.row("lock step", what, said, "≤ 1.15", limit)
        pace_s, slow_steps = 0.1, 20
        rows = _run(hosts, ["--straggler", str(pace_s), str(slow_steps)], max(3, rounds // 4))
        for name, goal in (("asp", "≥ 2.8"), ("ssp", "closed form")):
            ratios = [row[name]["samples_s"] / row["bsp"]["samples_s"] for row in rows]
            steps = rows[-1][name]["steps"]
            closed = (3 * min(SLOWNESS, (slow_steps + 3) / slow_steps) + 1) / 4
            limit = (
                "3.25 where nobody waits" if name == "asp" else f"{closed:.3f} by 3·({slow_steps}+3) steps"
            )
            said = f"{name.upper()}/BSP {statistics.median(ratios):.3f} ({interval(ratios)}); steps {steps}"
            table.row("straggler", f"mlp paced {1e3 * pace_s:.0f} ms, one 4× slower", said, goal, limit)


def _run(hosts: Hosts, arguments: list[str], rounds: int) -> Any:
    command = [sys.executable, "-m", "benchmarks.server", *arguments, "--rounds", str(rounds)]
    return json.loads(hosts.run(command, timeout=900, echo=False).splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--wire", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--lock-step", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--straggler", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.wire:
        wire(options.rounds)
    elif options.lock_step:
        lock_step(options.lock_step[0], float(options.lock_step[1]), options.rounds, 15)
    elif options.straggler:
        straggler(float(options.straggler[0]), options.rounds, int(options.straggler[1]))
    else:
        table = Table("server", __doc__ or "", ["question", "case", "result", "goal", "limit"])
        measure_wire(table, options.rounds)
        measure_hosts(table, options.rounds)
        fold, reply, once = folding()
        said = f"{(fold + reply) / once:.2f} passes ({fold:.1f} + {reply:.1f} ms; one takes {once:.1f} ms)"
        table.row("folding", "a push of 40 MB", said, "≤ 2", "2: the sum, the copy")
        table.write()


if __name__ == "__main__":
    sys.exit(main())
