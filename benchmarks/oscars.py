"""Does Oscars use workers that differ in speed?

    python -m benchmarks.oscars --data FOLDER

On 4 shaped hosts, Fashion-MNIST's MLP, batch 32, the ranks paced 1×, 1×, 2× and 4×: torch DDP, Oscars, and
every worker alone, in the same processes, in turn. Goals: samples a second at least 0.9 of the sum of what
the workers do alone; the fastest worker idle for less than 10% of the time; as accurate as DDP in the end,
less half a point, at least 2 times sooner. The global model is copied now and then while training goes on,
and evaluated afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from benchmarks.hosts import Hosts
from benchmarks.tables import Table
from offbeat.data.batching import batches
from offbeat.experiments.loop import seed_step
from offbeat.experiments.tasks import task
from offbeat.worlds.processes.emulation import pace

SLOWNESS = (1.0, 1.0, 2.0, 4.0)
HOSTS = len(SLOWNESS)
BATCH = 32
LOOKS = 30  # copies of the model, in a run
Look = tuple[float, dict[str, Tensor]]


class Runner:
    """One rank's model and data, made anew for each run."""

    def __init__(self, folder: Path, seed: int, pace_s: float) -> None:
        self.rank, self.seed = dist.get_rank(), seed
        self.task = task("fashion-mnist", model="mlp", batch_size=BATCH)
        self.data = self.task.load(folder)
        torch.manual_seed(seed)
        self.model = self.task.build()
        self.optimizer = self.task.optimizer(self.model)
        self.order = batches(len(self.data), self.rank, HOSTS, BATCH, seed)
        self.steps = 0
        self.paced_s = pace_s

    def step(self, forward: nn.Module) -> None:
        self.steps += 1
        seed_step(self.seed, self.rank, self.steps)
        inputs, targets = self.data.batch(next(self.order))
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(forward(inputs), targets).backward()
        self.optimizer.step()

    def pace(self) -> None:
        pace(self.model, self.paced_s, factor=SLOWNESS[self.rank])

    def copy(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def accuracies(self, looks: list[Look]) -> list[tuple[float, float]]:
        """Seconds and accuracy."""
        told = []
        fresh = self.task.build()
        for seconds, state in looks:
            fresh.load_state_dict(state)
            told.append((seconds, self.task.evaluate(fresh, self.data)))
        return told


def ddp(runner: Runner, run_s: float) -> dict[str, Any]:
    runner.pace()
    forward = DistributedDataParallel(runner.model)
    steps = int(run_s / (runner.paced_s * max(SLOWNESS)))
    looks: list[Look] = []
    dist.barrier()
    began = time.perf_counter()
    while runner.steps < steps:
        runner.step(forward)
        if runner.rank == 0 and runner.steps % max(1, steps // LOOKS) == 0:
            looks.append((time.perf_counter() - began, runner.copy()))
    return {"steps": runner.steps, "seconds": time.perf_counter() - began, "looks": looks}


def oscars(runner: Runner, run_s: float) -> dict[str, Any]:
    with offbeat.attach(runner.model, runner.optimizer, offbeat.Oscars(), timeout_s=120) as sync:
        runner.pace()
        looks: list[Look] = []
        dist.barrier()
        before = sync.metrics
        began = time.perf_counter()
        while (now := time.perf_counter() - began) < run_s:
            sync.samples(BATCH)
            runner.step(runner.model)
            if runner.rank == 0 and now > len(looks) * run_s / LOOKS:
                with sync.consensus(alone=True):
                    looks.append((time.perf_counter() - began, runner.copy()))
        seconds, after = time.perf_counter() - began, sync.metrics
    idle_s = after.wait_s - before.wait_s
    return {
        "steps": runner.steps,
        "seconds": seconds,
        "looks": looks,
        "idle": idle_s / seconds,
        "plan": after.planned_steps,
        "refused": after.refused,
    }


def alone(runner: Runner, run_s: float) -> dict[str, Any]:
    runner.pace()
    dist.barrier()
    began = time.perf_counter()
    while time.perf_counter() - began < run_s:
        runner.step(runner.model)
    return {"steps": runner.steps, "seconds": time.perf_counter() - began, "looks": []}


CONTENDERS: dict[str, Callable[[Runner, float], dict[str, Any]]] = {
    "ddp": ddp,
    "oscars": oscars,
    "alone": alone,
}


def work(folder: Path, seed: int, pace_s: float, run_s: float) -> None:
    """One rank: all contenders in turn. Rank 0 prints what all told."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    row: dict[str, Any] = {}
    for name, run in CONTENDERS.items():
        runner = Runner(folder, seed, pace_s)
        told = run(runner, run_s / 4 if name == "alone" else run_s)
        dist.barrier()
        history = runner.accuracies(told.pop("looks"))
        mine = torch.tensor(list(told.values()), dtype=torch.float64)
        everybody = [torch.zeros_like(mine) for _ in range(HOSTS)]
        dist.all_gather(everybody, mine)
        each = [dict(zip(told, theirs.tolist(), strict=True)) for theirs in everybody]
        row[name] = {"each": each, "history": history}
    if dist.get_rank() == 0:
        print(json.dumps(row))
    dist.destroy_process_group()


def samples_s(everybody: list[dict[str, Any]]) -> float:
    return BATCH * sum(told["steps"] / told["seconds"] for told in everybody)


def smoothed(history: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The accuracy of three looks in a row, at the last of them: early in training it jumps."""
    return [
        (history[k][0], statistics.mean(accuracy for _, accuracy in history[k - 2 : k + 1]))
        for k in range(2, len(history))
    ]


def measure(table: Table, hosts: Hosts, options: argparse.Namespace, seed: int) -> list[float]:
    arguments = ["--worker", str(options.data), str(seed), str(options.pace), str(options.seconds)]
    command = [sys.executable, "-m", "benchmarks.oscars", *arguments]
    row = json.loads(hosts.run(command, timeout=600, echo=False).splitlines()[-1])
    rates = {name: samples_s(told["each"]) for name, told in row.items()}
    ours = row["oscars"]["each"]
    idle = max(told["idle"] for told in ours[:2])
    smooth = {name: smoothed(told["history"]) for name, told in row.items()}
    target = smooth["ddp"][-1][1] - 0.005
    reached = {
        name: next((seconds for seconds, accuracy in history if accuracy >= target), None)
        for name, history in smooth.items()
    }
    sooner = reached["ddp"] / reached["oscars"] if reached["oscars"] else 0.0
    share = rates["oscars"] / rates["alone"]
    plans = " ".join(f"{told['plan']:.0f}" for told in ours)
    slowest_s = options.pace * max(SLOWNESS)
    limit = BATCH * sum(1 / (options.pace * factor) for factor in SLOWNESS)
    said = f"{rates['oscars']:.0f} of {rates['alone']:.0f} a second: {share:.3f}; DDP {rates['ddp']:.0f}"
    table.row(str(seed), "samples", said, "≥ 0.9", f"{limit:.0f}; DDP {BATCH * HOSTS / slowest_s:.0f}")
    dropped = sum(told["refused"] for told in ours)
    said = f"{idle:.1%}; last plan {plans}; {dropped:.0f} updates dropped"
    table.row(str(seed), "idle, fastest", said, "< 10%", "0")
    seconds = "never" if reached["oscars"] is None else f"{reached['oscars']:.1f} s"
    said = f"{seconds} against DDP's {reached['ddp']:.1f} s to {target:.4f}: {sooner:.2f} times sooner"
    table.row(str(seed), "to target", said, "≥ 2", f"{limit * slowest_s / BATCH / HOSTS:.2f}: by samples")
    return [share, idle, sooner]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("OFFBEAT_DATA"), help="the data sets")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pace", type=float, default=0.05, help="seconds of a step of the fastest")
    parser.add_argument("--seconds", type=float, default=30.0, help="of training, for DDP and for Oscars")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        folder, seed, pace_s, run_s = options.worker
        work(Path(folder), int(seed), float(pace_s), float(run_s))
        return
    if options.data is None:
        parser.error("say where the data sets are: --data FOLDER, or OFFBEAT_DATA")
    table = Table("oscars", __doc__ or "", ["seed", "question", "result", "goal", "limit"])
    with Hosts(count=HOSTS, rate=options.rate) as hosts:
        table.note(hosts.describe_link())
        rows = [measure(table, hosts, options, seed) for seed in range(options.seeds)]
    share, idle, sooner = (statistics.median(column) for column in zip(*rows, strict=True))
    said = f"samples {share:.3f} of alone, idle {idle:.1%}, {sooner:.2f} times sooner"
    table.row("median", "all three", said, "≥ 0.9, < 10%, ≥ 2", "")
    table.write()


if __name__ == "__main__":
    main()
