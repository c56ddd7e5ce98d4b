"""offbeat calibrate: measure the machines at hand, and write a cluster file that `simulate` reads."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

from offbeat.cli import options
from offbeat.cli.terminal import Terminal
from offbeat.core.files import write_atomic
from offbeat.errors import SettingError
from offbeat.experiments.calibration import StepTimes, cluster_of, time_links, time_steps
from offbeat.experiments.process_run import RunOptions
from offbeat.experiments.tasks import Task
from offbeat.worlds.processes.launcher import launch, under_launcher, workers_of_environment
from offbeat.worlds.processes.metrics_store import MetricsStore
from offbeat.worlds.processes.rendezvous import connect_group
from offbeat.worlds.virtual.cluster import dump


def calibrate_command(
    task: options.TaskName,
    out: Annotated[Path, typer.Option(help="The cluster file to write.")] = Path("cluster.toml"),
    workers: options.Workers = 4,
    steps: Annotated[int, typer.Option(help="Steps to time on every rank.")] = 30,
    model: options.Model = None,
    batch_size: options.BatchSize = None,
    data: options.DataFolder = None,
    force: options.Force = False,
    bandwidth: options.Bandwidth = None,
    pace: options.Pace = None,
    slow: options.Slow = None,
    device: options.Device = "cpu",
    timeout: options.Timeout = 300.0,
) -> None:
    """Measure a step of TASK on every rank, and what the links give; write a cluster file for `simulate`.

    On the cluster itself, start it with torchrun:
    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-endpoint HOST:29500 -m offbeat calibrate digits
    """
    workers = workers_of_environment() if under_launcher() else workers
    if steps < 1:
        raise SettingError(f"--steps {steps}: at least 1 is needed")
    options.check_device(device)
    options.check_file(out)
    if out.exists() and not force:
        raise SettingError(f"{out} exists: choose another --out, or give --force")
    what = options.task_of(task, model=model, batch_size=batch_size)
    emulation = options.emulation_of(bandwidth, pace, slow, workers)
    place = RunOptions(data=data, device=device, timeout_s=timeout, emulation=emulation)
    if measure_all(workers, what, place, steps, out):
        Terminal().say(f"written: {out}")


def measure_all(workers: int, task: Task, place: RunOptions, steps: int, out: Path) -> bool:
    """Measure on all ranks: under torchrun on those that there are, else on local ones that are started.

    Whether this process is the one to go on: rank 0, or the one that started the ranks.
    """
    if under_launcher():
        measure(task, place, steps, out)
        return os.environ["RANK"] == "0"
    task.load(place.data)  # what is missing should be said once, before four processes start
    launch(workers, measure, task, place, steps, out)
    return True


def measure(task: Task, place: RunOptions, steps: int, out: Path) -> None:
    """One rank's part; rank 0 writes the file and says what was found."""
    device = torch.device(place.device)
    data = task.load(place.data).to(device)
    torch.manual_seed(0)
    model = task.build().to(device)
    port = connect_group(device, {"task": repr(task)}, place.timeout_s, place.bits_per_s)
    place.emulation.apply(model, port.rank)
    console = Terminal(quiet=port.rank != 0)
    metrics_store = MetricsStore(port.failures.store, port.rank, port.world)
    like = next(model.parameters())
    bits_per_s, operation_s = float("inf"), 0.0
    if port.world > 1:
        console.say("timing the links …")
        bits_per_s, operation_s = time_links(port, like)
    console.say(f"timing {steps} steps of {task.name} ({task.model}) on {port.world} ranks …")
    times = time_steps(task, data, model, port.rank, port.world, steps)
    ranks = [StepTimes(**found) for found in metrics_store.gather_json(asdict(times), place.timeout_s)]
    if port.rank == 0:
        notes = "; ".join(place.emulation.notes())
        summary = f"{task.name} ({task.model}) as measured on {port.world} ranks" + (
            f"; {notes}" if notes else ""
        )
        write_atomic(out, dump(cluster_of(summary, ranks, bits_per_s, operation_s)))
        for rank, found in enumerate(ranks):
            median_ms = 1e3 * sorted(found.seconds)[len(found.seconds) // 2]
            console.say(f"rank {rank}: {median_ms:.2f} ms a step")
        console.say(f"links: {bits_per_s / 1e6:.4g} Mbit/s, {1e3 * operation_s:.2f} ms an operation")
    port.failures.leave(port.operations, "")
    port.failures.wait_for_exit(place.timeout_s)
