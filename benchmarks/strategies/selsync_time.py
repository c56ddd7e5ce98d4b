"""How soon does SelSync match DDP's accuracy?

    python -m benchmarks run selsync_time --data FOLDER

On four emulated hosts, Fashion-MNIST's MLP without pacing, 32 samples per worker: torch's DDP trains for
`--epochs`. Then SelSync trains until its accuracy is at most half a point below DDP's final one, with each
`--delta`, each `--period` (steps between two flags), and with the flag of the same step (`--late no`) or of
the step before (`--late yes`). Seconds are those of training, without evaluation.
Goals: at least 3x sooner at 1 Gbit/s and 6x sooner at 200 Mbit/s. "alone" is a loop on every worker that
never communicates: it shows how long a step's computation takes here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from benchmarks.support.hosts import Hosts
from benchmarks.support.options import add_data_option, benchmark_parser, require_data
from benchmarks.support.tables import Table
from benchmarks.support.training import train_step
from benchmarks.support.workers import run_on_hosts, slowest
from offbeat.data.batching import batches
from offbeat.experiments.loop import seed_step
from offbeat.experiments.tasks import task

HOSTS = 4
BATCH = 32
EVALUATE_EVERY = 50
GOALS = {"1gbit": 3.0, "200mbit": 6.0}


def train(
    step: Callable[[Any], None],
    evaluate: Callable[[], float],
    data: Any,
    seed: int,
    steps: int,
    target: float,
) -> list[tuple[int, float, float]]:
    """Train until the steps are done or the target is reached; return steps, seconds and accuracies."""
    order = batches(len(data), dist.get_rank(), HOSTS, BATCH, seed)
    history, seconds = [], 0.0
    for number in range(1, steps + 1):
        start = time.perf_counter()
        seed_step(seed, dist.get_rank(), number)
        step(data.batch(next(order)))
        seconds += time.perf_counter() - start
        if number % EVALUATE_EVERY == 0 or number == steps:
            slowest_s = slowest(seconds)
            accuracy = torch.tensor([evaluate()], dtype=torch.float64)
            dist.broadcast(accuracy, 0)
            history.append((number, slowest_s, accuracy.item()))
            if accuracy.item() >= target:
                break
    return history


def work(name: str, settings: dict[str, Any], folder: Path, seed: int, steps: int, target: float) -> None:
    """Train one rank under DDP or a strategy; rank 0 prints the history of accuracies."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    what = task("fashion-mnist", model="mlp", batch_size=BATCH)
    data = what.load(folder)
    torch.manual_seed(seed)
    model = what.build()
    optimizer = what.optimizer(model)

    def step_of(forward: nn.Module) -> Callable[[Any], None]:
        def step(batch: Any) -> None:
            train_step(forward, optimizer, *batch)

        return step

    def evaluate() -> float:
        return what.evaluate(model, data) if dist.get_rank() == 0 else 0.0

    lssr = 0.0
    if name == "ddp":
        history = train(step_of(DistributedDataParallel(model)), evaluate, data, seed, steps, target)
    else:
        strategy = offbeat.strategies.STRATEGIES[name](**settings)
        with offbeat.attach(model, optimizer, strategy, timeout_s=120) as sync:

            def evaluate_consensus() -> float:
                with sync.consensus():
                    return evaluate()

            history = train(step_of(model), evaluate_consensus, data, seed, steps, target)
            lssr = sync.metrics.lssr
    if dist.get_rank() == 0:
        print(json.dumps({"history": history, "lssr": lssr}))


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("selsync_time", __doc__)
    add_data_option(parser)
    parser.add_argument("--epochs", type=float, default=2.0, help="epochs of DDP")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rates", nargs="+", default=list(GOALS), choices=list(GOALS))
    parser.add_argument("--delta", type=float, nargs="+", default=[0.08, 0.12, 0.2, 0.3])
    parser.add_argument("--period", type=int, nargs="+", default=[1])
    parser.add_argument("--late", nargs="+", default=["no", "yes"], choices=["no", "yes"])
    parser.add_argument("--worker", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        name, settings, folder, seed, steps, target = options.worker
        work(name, json.loads(settings), Path(folder), int(seed), int(steps), float(target))
        return
    data_folder = require_data(parser, options)
    choices = itertools.product(options.delta, options.period, options.late)
    try:
        tries = [
            offbeat.SelSync(delta=delta, period=period, late=late == "yes") for delta, period, late in choices
        ]
    except offbeat.SettingError as error:
        parser.error(str(error))
    columns = [
        "rate",
        "seed",
        "strategy",
        "steps",
        "seconds",
        "accuracy",
        "x sooner",
        "LSSR",
        "goal",
    ]
    table = Table("selsync_time", __doc__ or "", columns)
    samples = len(task("fashion-mnist").load(data_folder))
    steps = int(options.epochs * (samples // HOSTS // BATCH))
    with Hosts(count=HOSTS, rate="1gbit") as hosts:
        for rate in options.rates:
            hosts.set_rate(rate)
            table.note(hosts.describe_link())
            for seed in range(options.seeds):
                measure(table, hosts, tries, data_folder, rate, seed, steps)
    table.write()


def measure(
    table: Table, hosts: Hosts, tries: list[offbeat.SelSync], folder: Path, rate: str, seed: int, steps: int
) -> None:
    """Add the rows of one rate and seed."""

    def run(name: str, settings: dict[str, Any], steps: int, target: float) -> Any:
        worker = ["--worker", name, json.dumps(settings), folder, seed, steps, target]
        return run_on_hosts(hosts, "selsync_time", *worker, timeout=1800)

    history = run("ddp", {}, steps, 2.0)["history"]
    target = history[-1][2] - 0.005
    number, ddp_s, accuracy = next(point for point in history if point[2] >= target)
    table.row(
        rate,
        str(seed),
        "ddp",
        f"{number} of {steps}",
        f"{ddp_s:.1f}",
        f"{accuracy:.4f}",
        "1",
        "",
        f"{target:.4f}",
    )
    alone = run("local_sgd", {"period": 10**9}, 300, 2.0)["history"][-1]
    table.row(rate, str(seed), "alone", "300", f"{alone[1]:.1f}", "", "", "", "")
    for strategy in tries:
        result = run("selsync", strategy.settings(), 4 * steps, target)
        number, seconds, accuracy = result["history"][-1]
        sooner = f"{ddp_s / seconds:.2f}" if accuracy >= target else "not reached"
        name = f"selsync, delta {strategy.delta:g}"
        name += f", period {strategy.period}" if strategy.period > 1 else ""
        name += ", late" if strategy.late else ""
        cells = [rate, str(seed), name, str(number), f"{seconds:.1f}", f"{accuracy:.4f}", sooner]
        table.row(*cells, f"{result['lssr']:.3f}", f"≥ {GOALS[rate]:g}")
