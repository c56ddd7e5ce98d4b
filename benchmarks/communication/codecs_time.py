"""What do codecs gain on a slow network?

    python -m benchmarks run codecs_time --data FOLDER

On four emulated hosts at 200 Mbit/s, Fashion-MNIST's MLP without pacing, 32 samples per worker: torch's DDP,
and BSP with codecs, each from the same weights. First, steps of each are timed, interleaved, in the same
processes. Then each trains for `--epochs` on faster links, which does not change what is computed, and its
accuracy is measured. Goal: at least 4x DDP's samples per second, with an accuracy within a point of DDP's.
The limit for DDP is a ring all-reduce of its gradients at the link's rate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from benchmarks.support.hosts import Hosts
from benchmarks.support.limits import ring_s
from benchmarks.support.options import add_data_option, benchmark_parser, require_data
from benchmarks.support.tables import Table
from benchmarks.support.training import train_step
from benchmarks.support.workers import run_on_hosts, slowest
from offbeat.codecs import codec
from offbeat.core.blocks import trainable_bytes
from offbeat.core.units import parse_rate
from offbeat.data.batching import batches
from offbeat.experiments.tasks import task

HOSTS, BATCH, RATE, FAST = 4, 32, "200mbit", "10gbit"
CODECS = [
    "powersgd(4)",
    "error_feedback(powersgd(4))",
    "error_feedback(topk(0.01))",
    "error_feedback(quantize(8))",
]
CONTENDERS = ["ddp", "none", *CODECS]
WARM_UP = 5


class Runner:
    """Model under DDP, or under BSP with a codec; several of them train in turn."""

    def __init__(self, name: str, what: Any, data: Any, seed: int) -> None:
        torch.manual_seed(seed)
        self.what, self.data = what, data
        self.model = what.build()
        self.optimizer = what.optimizer(self.model)
        self.order = batches(len(data), dist.get_rank(), HOSTS, BATCH, seed)
        self.sync: offbeat.Sync | None = None
        if name == "ddp":
            self.forward: nn.Module = DistributedDataParallel(self.model)
        else:
            strategy = offbeat.BSP(codec=None if name == "none" else codec(name))
            self.sync = offbeat.attach(self.model, self.optimizer, strategy, timeout_s=120)
            self.forward = self.model

    def run(self, steps: int) -> float:
        """Train for `steps` steps; return the seconds of the slowest rank."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            train_step(self.forward, self.optimizer, *self.data.batch(next(self.order)))
        return slowest(time.perf_counter() - start)

    def accuracy(self) -> float:
        """Evaluate the model, on rank 0 only."""
        return self.what.evaluate(self.model, self.data) if dist.get_rank() == 0 else 0.0

    def close(self) -> float:
        """Detach the strategy; return the bytes that this rank has sent."""
        if self.sync is None:
            return 0.0
        sent = self.sync.metrics.bytes_sent
        self.sync.close()
        return sent


def work(folder: Path, seed: int, rounds: int, steps: int, epochs: float) -> None:
    """Time `rounds` rounds of steps on one rank; with no rounds, train for accuracy."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    what = task("fashion-mnist", model="mlp", batch_size=BATCH)
    data = what.load(folder)
    results: dict[str, Any] = {"nbytes": trainable_bytes(what.build())}
    names = CONTENDERS if rounds else ["ddp", *CODECS]  # BSP without a codec computes the same as DDP
    runners = {name: Runner(name, what, data, seed) for name in names}
    if rounds:
        for runner in runners.values():
            runner.run(WARM_UP)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, runner in runners.items():
            times[name].append(runner.run(steps) / steps)
    done = WARM_UP + rounds * steps if rounds else int(epochs * (len(data) // HOSTS // BATCH))
    for name, runner in runners.items():
        if not rounds:
            runner.run(done)
        accuracy = 0.0 if rounds else runner.accuracy()
        results[name] = {"step_s": times[name], "accuracy": accuracy, "steps": done}
        results[name]["sent"] = runner.close() / done
    if dist.get_rank() == 0:
        print(json.dumps(results))


def run_workers(hosts: Hosts, options: argparse.Namespace, rounds: int) -> Any:
    """Run `work` on all hosts with the options of this process."""
    passed = [f"--{name}={getattr(options, name)}" for name in ("data", "epochs", "seed", "steps")]
    return run_on_hosts(hosts, "codecs_time", "--worker", f"--rounds={rounds}", *passed, timeout=900)


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("codecs_time", __doc__)
    add_data_option(parser)
    parser.add_argument("--epochs", type=float, default=6.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="steps per round")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    folder = require_data(parser, options)
    if options.worker:
        work(folder, options.seed, options.rounds, options.steps, options.epochs)
        return
    columns = [
        "method",
        "ms per step",
        "samples per second",
        "/ DDP",
        "KB per step and worker",
        "accuracy",
        "goal",
    ]
    table = Table("codecs_time", __doc__ or "", columns)
    with Hosts(count=HOSTS, rate=RATE) as hosts:
        table.note(hosts.describe_link())
        results = run_workers(hosts, options, options.rounds)
        hosts.set_rate(FAST)  # the accuracy does not depend on the rate
        trained = run_workers(hosts, options, 0)
    ring_ms = 1e3 * ring_s(results["nbytes"], HOSTS, parse_rate(RATE) / 8)
    table.note(
        f"limit: a ring all-reduce of {results['nbytes'] / 1e6:.2f} MB of gradients takes {ring_ms:.1f} ms"
    )
    table.note(f"accuracy after {trained['ddp']['steps']} steps, trained at {FAST}")
    ddp = results["ddp"]
    for name in CONTENDERS:
        ours = results[name]
        ratios = [a / b for a, b in zip(ddp["step_s"], ours["step_s"], strict=True)]
        step_s = statistics.median(ours["step_s"])
        table.row(
            name if name == "ddp" else f"bsp, codec {name}",
            f"{step_s * 1e3:.1f}",
            f"{HOSTS * BATCH / step_s:.0f}",
            f"{statistics.median(ratios):.2f}",
            f"{ours['sent'] / 1e3:.1f}" if ours["sent"] else "",
            f"{trained[name]['accuracy']:.4f}" if name in trained else "DDP's",
            f"≥ 4, ≥ {trained['ddp']['accuracy'] - 0.01:.4f}" if name in CODECS else "",
        )
    table.write()
