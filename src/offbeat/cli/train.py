"""offbeat train: train a task over real processes, here or under torchrun on several hosts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.cli import options
from offbeat.cli.terminal import Terminal
from offbeat.errors import SettingError

if TYPE_CHECKING:
    from offbeat.core.ledger import WorkerTotals
    from offbeat.experiments.loop import Callback
    from offbeat.experiments.planner.plan_file import Plan
    from offbeat.experiments.summary import Summary


@options.expand_groups
def train_command(
    task: options.TaskName,
    *,
    from_file: options.From = None,
    strategy: options.StrategyName = "bsp",
    settings: options.Settings = None,
    length: options.Length,
    seed: options.Seed = 0,
    model: options.Model,
    course: options.Course,
    folders: options.Folders,
    emulated: options.Emulated,
    elastic: options.Elastic,
    restarts: options.Restarts = 3,
    device: options.Device = "cpu",
    timeout: options.Timeout = 300.0,
    trace: options.Trace = None,
    insecure: options.Insecure = False,
    live: options.LiveOutputs,
) -> None:
    """Train TASK with real worker processes and write summary.json.

    On one machine, this command starts --workers processes. On several hosts, start it with torchrun:

    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-endpoint HOST:29500 -m offbeat train digits

    To train with the result of `offbeat plan`: `offbeat train --from plan.toml`
    """
    from offbeat.cli import parse
    from offbeat.cli.outputs import RunCallbacks
    from offbeat.cli.progress import report_interrupt
    from offbeat.cli.tables import result_table, worker_table
    from offbeat.experiments.process_run import RunOptions, run_rank, train_here
    from offbeat.experiments.report.aggregate import cautions
    from offbeat.worlds.processes.launcher import under_launcher, workers_of_environment

    plan = read_plan(from_file, task, strategy)
    if plan and length.epochs is not None and length.steps == plan.steps:
        length = replace(length, steps=None)  # --epochs was given, and takes precedence
    if under_launcher():
        length = replace(length, workers=workers_of_environment())
    chosen = parse.strategy_of(strategy, [*(plan.pairs() if plan else []), *(settings or [])])
    job = parse.job_of(parse.task_of(task, model), chosen, seed, length, course)
    emulation = parse.emulation_of(emulated, job.workers)
    run_options = RunOptions(
        data=folders.data,
        device=device,
        timeout_s=timeout,
        trace=trace,
        emulation=emulation,
        insecure=insecure,
        elastic=elastic.elastic,
        minimum=elastic.minimum,
        restarts=restarts,
    )
    run_options.check(job)
    options.check_device(device)
    options.check_file(trace)
    is_rank_0 = os.environ.get("RANK", "0") == "0"
    if is_rank_0:
        live.check(folders.force)
    out = parse.out_of(folders.out, task, strategy)
    console = Terminal(quiet=not is_rank_0)
    for note in [*emulation.notes(), *(plan.notes(job.workers) if plan else [])]:
        console.warn(note)
    callbacks = RunCallbacks(live)
    workers = "1 worker" if job.workers == 1 else f"{job.workers} workers"
    training = f"training {task} ({job.task.model}) under {strategy}"
    with report_interrupt(console, out / "summary.json"):
        if under_launcher():

            def claim_first(
                latest: Callable[[], list[WorkerTotals]], hosts: Callable[[], dict[int, str]] = dict
            ) -> list[Callback]:
                options.claim(out, folders.force)  # all ranks are connected: an error here reaches them all
                return callbacks(latest, hosts)

            if is_rank_0 and not live.quiet:
                console.tell(f"{training}: {workers} on all hosts")
            run_rank(job, run_options, out, claim_first)
            if (
                not is_rank_0 or not (out / "summary.json").exists()
            ):  # an elastic worker elsewhere may write it
                return
            summary: Summary = json.loads((out / "summary.json").read_text())
        else:
            options.claim(out, folders.force)
            job.task.load(folders.data)  # reports missing data once, before the processes start
            if not live.quiet:
                console.tell(f"{training}: starting {workers} here")
            summary = train_here(job, run_options, out, callbacks)
    console.show(worker_table(summary))
    console.show(result_table([summary]))
    for caution in cautions([summary]):
        console.warn(caution)
    console.say(f"written: {out / 'summary.json'}")


def read_plan(file: Path | None, task: str, strategy: str) -> Plan | None:
    """Read the plan for this task, if a file is given; settings of another strategy are dropped."""
    from offbeat.experiments.planner.plan_file import load_plan

    if file is None:
        return None
    plan = load_plan(file)
    if plan.task != task:
        raise SettingError(f"{file} is a plan for {plan.task}, not for {task}: leave out TASK or --from")
    return plan if plan.strategy == strategy else replace(plan, strategy=strategy, strategy_settings={})
