"""How much sooner is SelSync as accurate as DDP?

    python -m benchmarks.selsync_time --data FOLDER

On 4 shaped hosts, Fashion-MNIST's MLP as it is (unpaced), batch 32 a worker: torch DDP for `--epochs`; then
SelSync until its accuracy is DDP's final one less half a point, with each `--delta` and each `--period` (the
steps from one flag to the next), by the flag of the same step and by that of the step before (`late`; one of
the two: `--late no`, `--late yes`). Seconds are those of training, without evaluation.
Goals: at least 3 times sooner at 1 Gbit/s and 6 times at 200 Mbit/s. "alone" is a worker's loop that never
communicates, beside the others: what a step's computation takes here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from benchmarks.hosts import Hosts
from benchmarks.tables import Table
from offbeat.sampling import batches
from offbeat.tasks import task
from offbeat.train import seed_step

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
    """Steps, seconds and accuracy, until the steps are done or the accuracy is there."""
    order = batches(len(data), dist.get_rank(), HOSTS, BATCH, seed)
    history, seconds = [], 0.0
    for number in range(1, steps + 1):
        began = time.perf_counter()
        seed_step(seed, dist.get_rank(), number)
        step(data.batch(next(order)))
        seconds += time.perf_counter() - began
        if number % EVALUATE_EVERY == 0 or number == steps:
            slowest = torch.tensor([seconds], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            accuracy = torch.tensor([evaluate()], dtype=torch.float64)
            dist.broadcast(accuracy, 0)
            history.append((number, slowest.item(), accuracy.item()))
            if accuracy.item() >= target:
                break
    return history


def work(name: str, settings: dict[str, Any], folder: Path, seed: int, steps: int, target: float) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    what = task("fashion-mnist", model="mlp", batch_size=BATCH)
    data = what.load(folder)
    torch.manual_seed(seed)
    model = what.build()
    optimizer = what.optimizer(model)

    def step_of(forward: nn.Module) -> Callable[[Any], None]:
        def step(batch: Any) -> None:
            optimizer.zero_grad()
            inputs, targets = batch
            nn.functional.cross_entropy(forward(inputs), targets).backward()
            optimizer.step()

        return step

    def look() -> float:
        return what.evaluate(model, data) if dist.get_rank() == 0 else 0.0

    lssr = 0.0
    if name == "ddp":
        history = train(step_of(DistributedDataParallel(model)), look, data, seed, steps, target)
    else:
        strategy = offbeat.strategies.STRATEGIES[name](**settings)
        with offbeat.attach(model, optimizer, strategy, timeout_s=120) as sync:

            def look_together() -> float:
                with sync.consensus():
                    return look()

            history = train(step_of(model), look_together, data, seed, steps, target)
            lssr = sync.metrics.lssr
    if dist.get_rank() == 0:
        print(json.dumps({"history": history, "lssr": lssr}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("OFFBEAT_DATA"), help="the data sets")
    parser.add_argument("--epochs", type=float, default=2.0, help="of DDP")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rates", nargs="+", default=list(GOALS), choices=list(GOALS))
    parser.add_argument("--delta", type=float, nargs="+", default=[0.08, 0.12, 0.2, 0.3])
    parser.add_argument("--period", type=int, nargs="+", default=[1])
    parser.add_argument("--late", nargs="+", default=["no", "yes"], choices=["no", "yes"])
    parser.add_argument("--worker", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        name, settings, folder, seed, steps, target = options.worker
        work(name, json.loads(settings), Path(folder), int(seed), int(steps), float(target))
        return
    if options.data is None:
        parser.error("say where the data sets are: --data FOLDER, or OFFBEAT_DATA")
    choices = itertools.product(options.delta, options.period, options.late)
    try:
        tries = [
            offbeat.SelSync(delta=delta, period=period, late=late == "yes") for delta, period, late in choices
        ]
    except offbeat.SettingError as wrong:
        parser.error(str(wrong))
    columns = ["rate", "seed", "strategy", "steps", "seconds", "accuracy", "sooner than DDP", "LSSR", "goal"]
    table = Table("selsync-time", __doc__ or "", columns)
    samples = len(task("fashion-mnist").load(Path(options.data)))
    steps = int(options.epochs * (samples // HOSTS // BATCH))
    with Hosts(count=HOSTS, rate="1gbit") as hosts:
        for rate in options.rates:
            hosts.set_rate(rate)
            table.note(hosts.describe_link())
            for seed in range(options.seeds):
                measure(table, hosts, tries, options.data, rate, seed, steps)
    table.write()


def measure(
    table: Table, hosts: Hosts, tries: list[offbeat.SelSync], folder: Path, rate: str, seed: int, steps: int
) -> None:
    def run(name: str, settings: dict[str, Any], steps: int, target: float) -> Any:
        arguments = [name, json.dumps(settings), str(folder), str(seed), str(steps), str(target)]
        command = [sys.executable, "-m", "benchmarks.selsync_time", "--worker", *arguments]
        return json.loads(hosts.run(command, timeout=1800, echo=False).splitlines()[-1])

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
        told = run("selsync", strategy.settings(), 4 * steps, target)
        number, seconds, accuracy = told["history"][-1]
        sooner = f"{ddp_s / seconds:.2f}" if accuracy >= target else "not reached"
        name = f"selsync, delta {strategy.delta:g}"
        name += f", period {strategy.period}" if strategy.period > 1 else ""
        name += ", late" if strategy.late else ""
        cells = [rate, str(seed), name, str(number), f"{seconds:.1f}", f"{accuracy:.4f}", sooner]
        table.row(*cells, f"{told['lssr']:.3f}", f"≥ {GOALS[rate]:g}")


if __name__ == "__main__":
    main()
