"""offbeat calibrate: measure the available machines, and write a cluster file that `simulate` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli import options
from offbeat.cli.terminal import say, say_nothing
from offbeat.errors import SettingError


@options.expand_groups
def calibrate_command(
    task: options.TaskName,
    *,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="The cluster file to write.")
    ] = Path("cluster.toml"),
    workers: options.Workers = 4,
    steps: Annotated[int, typer.Option(metavar="N", help="Steps to time on every rank.")] = 30,
    codec: Annotated[
        list[str] | None,
        typer.Option(
            "--codec", metavar="CODEC", help="A codec to time, such as 'half'; may be given several times."
        ),
    ] = None,
    model: options.ModelName = None,
    batch_size: options.BatchSize = None,
    data: options.DataFolder = None,
    force: options.Force = False,
    emulated: options.Emulated,
    device: options.Device = "cpu",
    timeout: options.Timeout = 300.0,
    quiet: options.Quiet = False,
) -> None:
    """Measure the steps of TASK and the links of all ranks; write a cluster file for `simulate`.

    On several hosts, start this command with torchrun:

    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-endpoint HOST:29500 -m offbeat calibrate digits
    """
    from offbeat.cli import parse
    from offbeat.codecs import codec as parse_codec
    from offbeat.experiments.calibration import measure_all
    from offbeat.experiments.process_run import RunOptions
    from offbeat.worlds.processes.launcher import under_launcher, workers_of_environment

    workers = workers_of_environment() if under_launcher() else workers
    if steps < 1:
        raise SettingError(f"--steps {steps}: at least 1 is needed")
    options.check_device(device)
    options.check_new_file(out, force)
    task_to_time = parse.task_of(task, options.Model(model=model, batch_size=batch_size))
    emulation = parse.emulation_of(emulated, workers)
    run_options = RunOptions(data=data, device=device, timeout_s=timeout, emulation=emulation)
    codecs = [parse_codec(text) for text in codec or []]
    if measure_all(workers, task_to_time, run_options, steps, out, say_nothing if quiet else say, codecs):
        say(f"written: {out}")
