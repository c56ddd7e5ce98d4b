"""On four hosts at 200 Mbit/s, how much sooner than DDP do DiLoCo and its kin train a GPT?

    python -m benchmarks run gpt_hosts --data FOLDER [--steps 64] [--rate 200mbit] [--only NAME …]

The GPT and the contenders of `gpt`, as real processes on four emulated hosts: 10.8 million parameters, so an
all-reduce takes 2.6 s. A worker has one thread, and a batch of one window of 64 bytes: four workers share two
cores here, and a larger one would hide the network. So seconds and bytes are what this table is for: the loss
after as few tokens as these, on the first 16,384 bytes of the test text, only shows that all of them learn.
Muon is left out: its matrices take seconds of a core in each step. DDP is BSP, which equals it bit for bit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.papers.gpt import CONTENDERS, QUICK, Sizes
from benchmarks.papers.gpt_run import GPTRun, GPTTask
from benchmarks.support.hosts import Hosts
from benchmarks.support.options import add_data_option, benchmark_parser, require_data
from benchmarks.support.tables import Table
from benchmarks.support.workers import run_on_hosts
from offbeat.experiments.job import Job
from offbeat.experiments.process_run import RunOptions, run
from offbeat.experiments.tasks.language import TextData

HOSTS = 4
NAMES = (
    "DDP",
    "LocalSGD, H 32",
    "DiLoCo, H 32, μ 0.5",
    "streaming, H 32",
    "eager, H 32, μ 0.5",
    "SparseLoCo, H 32",
)
TEST_BYTES = 1 << 14
TIMEOUT_S = 1800.0


class ShortTest(GPTTask):
    """The task with less text to evaluate on."""

    def load(self, folder: Path | None = None) -> TextData:
        data = super().load(folder)
        return TextData(data.train, data.test[:TEST_BYTES], self.context)


def job_of(name: str, sizes: Sizes, workers: int) -> Job:
    """Return a contender's training."""
    contender = CONTENDERS[name]
    shape = {key: value for key, value in vars(sizes).items() if key != "steps"}
    return Job(
        task=ShortTest(**shape),
        strategy=GPTRun(strategy=contender.strategy, settings=contender.settings).built,
        workers=workers,
        steps=sizes.steps,
        evaluate_every=sizes.steps,
        schedule="cosine",
        work="equal",
    )


def work(name: str, sizes: Sizes, folder: Path) -> dict[str, float]:
    """Train one rank; return the seconds, the bytes of all workers and the loss, at rank 0."""
    torch.set_num_threads(1)
    options = RunOptions(data=folder, timeout_s=TIMEOUT_S / 2)
    history = run(job_of(name, sizes, dist.get_world_size()), options, lambda worker: [])
    if dist.get_rank():
        return {}
    return {"seconds": history[-1].seconds, "bytes": history[-1].bytes_sent, "loss": history[-1].value}


def main(arguments: Sequence[str]) -> None:
    options = parse_options(arguments)
    sizes = QUICK if options.quick else Sizes(steps=options.steps, context=64, batch_size=1)
    if options.worker:
        dist.init_process_group("gloo")
        print(json.dumps(work(options.worker, sizes, options.data)))
        return
    columns = ["contender", "seconds", "s per step", "x DDP", "MB of a worker", "of DDP's", "loss"]
    table = Table("gpt_hosts", __doc__ or "", columns, "quick" if options.quick else "")
    found: dict[str, dict[str, Any]] = {}
    with Hosts(count=HOSTS, rate=options.rate) as hosts:
        table.note(f"{HOSTS} hosts, {sizes.steps} steps; {hosts.describe_link()}")
        for name in options.only:
            size = ["--steps", sizes.steps, *(["--quick"] if options.quick else [])]
            worker = ["--worker", name, "--data", options.data, *size]
            found[name] = run_on_hosts(hosts, "gpt_hosts", *worker, timeout=TIMEOUT_S)
            table.row(name, *cells_of(found[name], found.get("DDP"), sizes.steps))
    table.write()


def cells_of(ours: dict[str, Any], ddp: dict[str, Any] | None, steps: int) -> tuple[str, ...]:
    """Return the figures of a contender; without a run of DDP, those that compare with it are empty."""
    return (
        f"{ours['seconds']:.1f}",
        f"{ours['seconds'] / steps:.3f}",
        f"{ddp['seconds'] / ours['seconds']:.2f}" if ddp else "",
        f"{ours['bytes'] / HOSTS / 1e6:.0f}",
        f"{ours['bytes'] / ddp['bytes']:.4f}" if ddp else "",
        f"{ours['loss']:.3f}",
    )


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line, and exit with an error if something is missing."""
    parser = benchmark_parser("gpt_hosts", __doc__)
    add_data_option(parser)
    parser.add_argument("--steps", type=int, default=64, help="a multiple of 32")
    parser.add_argument("--rate", default="200mbit", help="of each host's link")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that the code works")
    parser.add_argument("--worker", choices=NAMES, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    require_data(parser, options)
    return options
