"""What do codecs gain on a slow network?

    python -m benchmarks.codecs_time --data FOLDER

On 4 shaped hosts at 200 Mbit/s, Fashion-MNIST's MLP as it is (unpaced), batch 32 a worker: torch DDP, and
BSP with codecs, each from the same weights. Some steps of each are timed, interleaved, in the same
processes; then each trains `--epochs` on faster links, which does not change what it trains, and its
accuracy is told. Goal: at least 4 times DDP's samples a second, with an accuracy within a point of DDP's.
The limit of DDP is its gradients around a ring at the link's rate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from benchmarks.hosts import Hosts
from benchmarks.tables import Table
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
    """A model under DDP or under BSP with a codec, to be trained in turns with others."""

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
        """Seconds of the slowest, for so many steps."""
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            inputs, targets = self.data.batch(next(self.order))
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.forward(inputs), targets).backward()
            self.optimizer.step()
        taken = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return taken.item()

    def accuracy(self) -> float:
        return self.what.evaluate(self.model, self.data) if dist.get_rank() == 0 else 0.0

    def close(self) -> float:
        """Bytes out of the NIC in all."""
        if self.sync is None:
            return 0.0
        sent = self.sync.metrics.bytes_sent
        self.sync.close()
        return sent


def work(folder: Path, seed: int, rounds: int, steps: int, epochs: float) -> None:
    """With rounds, time them; without, train for accuracy."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    what = task("fashion-mnist", model="mlp", batch_size=BATCH)
    data = what.load(folder)
    results: dict[str, Any] = {"nbytes": trainable_bytes(what.build())}
    names = CONTENDERS if rounds else ["ddp", *CODECS]  # without a codec, BSP trains what DDP trains
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


def on_all(hosts: Hosts, options: argparse.Namespace, rounds: int) -> Any:
    told = [f"--{name}={getattr(options, name)}" for name in ("data", "epochs", "seed", "steps")]
    command = [sys.executable, "-m", "benchmarks.codecs_time", "--worker", f"--rounds={rounds}", *told]
    return json.loads(hosts.run(command, timeout=900, echo=False).splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("OFFBEAT_DATA"), help="the data sets")
    parser.add_argument("--epochs", type=float, default=6.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.data is None:
        parser.error("say where the data sets are: --data FOLDER, or OFFBEAT_DATA")
    if options.worker:
        work(Path(options.data), options.seed, options.rounds, options.steps, options.epochs)
        return
    columns = [
        "under",
        "step ms",
        "samples a second",
        "times DDP's",
        "KB a step and worker",
        "accuracy",
        "goal",
    ]
    table = Table("codecs-time", __doc__ or "", columns)
    with Hosts(count=HOSTS, rate=RATE) as hosts:
        table.note(hosts.describe_link())
        results = on_all(hosts, options, options.rounds)
        hosts.set_rate(FAST)  # what is trained does not depend on it
        trained = on_all(hosts, options, 0)
    ring_s = 2 * (HOSTS - 1) / HOSTS * results["nbytes"] / (parse_rate(RATE) / 8)
    megabytes = results["nbytes"] / 1e6
    table.note(f"{megabytes:.2f} MB of gradients around a ring of {HOSTS}: {ring_s * 1e3:.1f} ms a step")
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


if __name__ == "__main__":
    main()
