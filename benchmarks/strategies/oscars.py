"""Does Oscars keep workers of different speeds busy?

    python -m benchmarks run oscars --data FOLDER

On four emulated hosts, Fashion-MNIST's MLP, batches of 32, the ranks slowed down by 1, 1, 2 and 4: torch's
DDP, Oscars, and every worker alone, in the same processes, in turn. Goals: at least 0.9 of the samples per
second that the workers reach alone; the fastest worker idle for less than 10% of the time; DDP's final
accuracy less half a point reached at least 2x sooner. During training the global model is copied from time to
time; the copies are evaluated afterwards.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from benchmarks.support.hosts import Hosts
from benchmarks.support.options import add_data_option, benchmark_parser, require_data
from benchmarks.support.tables import Table
from benchmarks.support.training import train_step
from benchmarks.support.workers import gather_rows, run_on_hosts
from offbeat.data.batching import batches
from offbeat.experiments.loop import seed_step
from offbeat.experiments.tasks import task
from offbeat.worlds.processes.emulation import pace

SLOWNESS = (1.0, 1.0, 2.0, 4.0)
HOSTS = len(SLOWNESS)
BATCH = 32
COPIES = 30  # copies of the model per run
Copy = tuple[float, dict[str, Tensor]]  # seconds, weights


class Runner:
    """Model and data of one rank; each run has a new one."""

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
        train_step(forward, self.optimizer, *self.data.batch(next(self.order)))

    def pace(self) -> None:
        """Slow the model down to the speed of this rank."""
        pace(self.model, self.paced_s, factor=SLOWNESS[self.rank])

    def copy(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def accuracies(self, copies: list[Copy]) -> list[tuple[float, float]]:
        """Evaluate copies of the model; return seconds and accuracies."""
        history = []
        model = self.task.build()
        for seconds, state in copies:
            model.load_state_dict(state)
            history.append((seconds, self.task.evaluate(model, self.data)))
        return history


def ddp(runner: Runner, run_s: float) -> dict[str, Any]:
    """Train under DDP for about `run_s` seconds."""
    runner.pace()
    forward = DistributedDataParallel(runner.model)
    steps = int(run_s / (runner.paced_s * max(SLOWNESS)))
    copies: list[Copy] = []
    dist.barrier()
    start = time.perf_counter()
    while runner.steps < steps:
        runner.step(forward)
        if runner.rank == 0 and runner.steps % max(1, steps // COPIES) == 0:
            copies.append((time.perf_counter() - start, runner.copy()))
    return {"steps": runner.steps, "seconds": time.perf_counter() - start, "copies": copies}


def oscars(runner: Runner, run_s: float) -> dict[str, Any]:
    """Train under Oscars for `run_s` seconds."""
    with offbeat.attach(runner.model, runner.optimizer, offbeat.Oscars(), timeout_s=120) as sync:
        runner.pace()
        copies: list[Copy] = []
        dist.barrier()
        before = sync.metrics
        start = time.perf_counter()
        while (now := time.perf_counter() - start) < run_s:
            sync.samples(BATCH)
            runner.step(runner.model)
            if runner.rank == 0 and now > len(copies) * run_s / COPIES:
                with sync.consensus(alone=True):
                    copies.append((time.perf_counter() - start, runner.copy()))
        seconds, after = time.perf_counter() - start, sync.metrics
    idle_s = after.wait_s - before.wait_s
    return {
        "steps": runner.steps,
        "seconds": seconds,
        "copies": copies,
        "idle": idle_s / seconds,
        "plan": after.planned_steps,
        "refused": after.refused,
    }


def alone(runner: Runner, run_s: float) -> dict[str, Any]:
    """Train without communication for `run_s` seconds."""
    runner.pace()
    dist.barrier()
    start = time.perf_counter()
    while time.perf_counter() - start < run_s:
        runner.step(runner.model)
    return {"steps": runner.steps, "seconds": time.perf_counter() - start, "copies": []}


CONTENDERS: dict[str, Callable[[Runner, float], dict[str, Any]]] = {
    "ddp": ddp,
    "oscars": oscars,
    "alone": alone,
}


def work(folder: Path, seed: int, pace_s: float, run_s: float) -> None:
    """Run all contenders in turn on one rank; rank 0 prints the figures of all ranks."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    row: dict[str, Any] = {}
    for name, run in CONTENDERS.items():
        runner = Runner(folder, seed, pace_s)
        figures = run(runner, run_s / 4 if name == "alone" else run_s)
        dist.barrier()
        history = runner.accuracies(figures.pop("copies"))
        ranks = gather_rows(list(figures.values()))
        row[name] = {
            "ranks": [dict(zip(figures, of_rank, strict=True)) for of_rank in ranks],
            "history": history,
        }
    if dist.get_rank() == 0:
        print(json.dumps(row))
    dist.destroy_process_group()


def samples_s(ranks: list[dict[str, Any]]) -> float:
    """Return the samples per second of all ranks."""
    return BATCH * sum(rank["steps"] / rank["seconds"] for rank in ranks)


def smoothed(history: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Average the accuracy over three evaluations in a row, because it jumps early in training."""
    return [
        (history[k][0], statistics.mean(accuracy for _, accuracy in history[k - 2 : k + 1]))
        for k in range(2, len(history))
    ]


def measure(table: Table, hosts: Hosts, options: argparse.Namespace, seed: int) -> list[float]:
    """Add the rows of one seed; return the fraction of samples, the idle fraction and the speed-up."""
    worker = ["--worker", options.data, seed, options.pace, options.seconds]
    row = run_on_hosts(hosts, "oscars", *worker, timeout=600)
    rates = {name: samples_s(figures["ranks"]) for name, figures in row.items()}
    ours = row["oscars"]["ranks"]
    idle = max(rank["idle"] for rank in ours[:2])
    smooth = {name: smoothed(figures["history"]) for name, figures in row.items()}
    target = smooth["ddp"][-1][1] - 0.005
    reached = {
        name: next((seconds for seconds, accuracy in history if accuracy >= target), None)
        for name, history in smooth.items()
    }
    sooner = reached["ddp"] / reached["oscars"] if reached["oscars"] else 0.0
    fraction = rates["oscars"] / rates["alone"]
    plans = " ".join(f"{rank['plan']:.0f}" for rank in ours)
    slowest_s = options.pace * max(SLOWNESS)
    limit = BATCH * sum(1 / (options.pace * factor) for factor in SLOWNESS)
    result = f"{rates['oscars']:.0f} of {rates['alone']:.0f}: {fraction:.3f}; DDP {rates['ddp']:.0f}"
    table.row(
        str(seed), "samples per second", result, "≥ 0.9", f"{limit:.0f}; DDP {BATCH * HOSTS / slowest_s:.0f}"
    )
    dropped = sum(rank["refused"] for rank in ours)
    result = f"{idle:.1%}; last plan {plans}; {dropped:.0f} updates dropped"
    table.row(str(seed), "idle time of the fastest", result, "< 10%", "0")
    seconds = "never" if reached["oscars"] is None else f"{reached['oscars']:.1f} s"
    result = f"{target:.4f} after {seconds}, DDP after {reached['ddp']:.1f} s: {sooner:.2f}x sooner"
    table.row(
        str(seed), "time to target", result, "≥ 2", f"{limit * slowest_s / BATCH / HOSTS:.2f}: by samples"
    )
    return [fraction, idle, sooner]


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("oscars", __doc__)
    add_data_option(parser)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pace", type=float, default=0.05, help="seconds per step of the fastest worker")
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="seconds of training, DDP and Oscars each"
    )
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        folder, seed, pace_s, run_s = options.worker
        work(Path(folder), int(seed), float(pace_s), float(run_s))
        return
    require_data(parser, options)
    table = Table("oscars", __doc__ or "", ["seed", "question", "result", "goal", "limit"])
    with Hosts(count=HOSTS, rate=options.rate) as hosts:
        table.note(hosts.describe_link())
        rows = [measure(table, hosts, options, seed) for seed in range(options.seeds)]
    fraction, idle, sooner = (statistics.median(column) for column in zip(*rows, strict=True))
    result = f"samples {fraction:.3f} of alone, idle {idle:.1%}, {sooner:.2f}x sooner"
    table.row("median", "all three", result, "≥ 0.9, < 10%, ≥ 2", "")
    table.write()
