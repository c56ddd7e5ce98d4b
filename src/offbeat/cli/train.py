"""offbeat train: train a task over real processes, here or under torchrun on several hosts."""

from __future__ import annotations

import json
import os
from pathlib import Path

from offbeat.cli import options
from offbeat.cli.outputs import NOTHING, LiveOutputs
from offbeat.cli.progress import Display, report_interrupt, result_table, worker_table
from offbeat.cli.terminal import Terminal
from offbeat.experiments.callbacks.recorder import Recorder
from offbeat.experiments.loop import Callback, Job
from offbeat.experiments.process_run import ProcessWorker, RunOptions, run
from offbeat.experiments.summary import Summary
from offbeat.worlds.processes.launcher import launch, under_launcher, workers_of_environment


def train_command(
    task: options.TaskName,
    from_file: options.From = None,
    strategy: options.StrategyName = "bsp",
    settings: options.Settings = None,
    workers: options.Workers = 4,
    epochs: options.Epochs = None,
    steps: options.Steps = None,
    seed: options.Seed = 0,
    model: options.Model = None,
    batch_size: options.BatchSize = None,
    lr: options.LearningRate = None,
    target: options.Target = None,
    evaluate_every: options.EvaluateEvery = None,
    order: options.Order = "shuffled",
    skew: options.Skew = None,
    inject: options.Inject = None,
    data: options.DataFolder = None,
    out: options.Out = None,
    force: options.Force = False,
    bandwidth: options.Bandwidth = None,
    pace: options.Pace = None,
    slow: options.Slow = None,
    device: options.Device = "cpu",
    timeout: options.Timeout = 300.0,
    trace: options.Trace = None,
    log: options.Log = None,
    tensorboard: options.TensorBoard = None,
    dashboard: options.Dashboard = False,
    dashboard_port: options.DashboardPort = 0,
) -> None:
    """Train TASK with real worker processes and write summary.json.

    Alone, it starts --workers processes on this machine. On several hosts, start the same command with
    torchrun:  torchrun --nnodes 2 --nproc-per-node 4 --rdzv-endpoint HOST:29500 -m offbeat train digits

    What `offbeat plan` has chosen is trained by  offbeat train --from plan.toml
    """
    plan = options.planned(from_file, task, strategy)
    if plan and epochs is not None and steps == plan.steps:
        steps = None  # --epochs is given, and counts more
    workers = workers_of_environment() if under_launcher() else workers
    job = Job(
        task=options.task_of(task, model=model, batch_size=batch_size, lr=lr),
        strategy=options.strategy_of(strategy, [*(plan.pairs() if plan else []), *(settings or [])]),
        workers=workers,
        seed=seed,
        epochs=epochs,
        steps=steps,
        evaluate_every=evaluate_every,
        target=target,
        order=order,
        skew=skew,
        inject=options.shares_of(inject),
    )
    emulation = options.emulation_of(bandwidth, pace, slow, workers)
    place = RunOptions(data=data, device=device, timeout_s=timeout, trace=trace, emulation=emulation)
    options.check_device(device)
    options.check_file(trace)
    live = LiveOutputs(log=log, tensorboard=tensorboard, dashboard=dashboard, port=dashboard_port)
    first = os.environ.get("RANK", "0") == "0"
    if first:
        live.check(force)
    out = options.out_of(out, task, strategy)
    console = Terminal(quiet=not first)
    for note in [*emulation.notes(), *(plan.notes(workers) if plan else [])]:
        console.warn(note)
    with report_interrupt(console, out / "summary.json"):
        if under_launcher():
            work(job, place, out, force, live)
            return
        options.claim(out, force)
        job.task.load(data)  # what is missing should be said once, before four processes start
        summary = train_here(job, place, out, live)
    console.print(worker_table(summary))
    console.print(result_table([summary]))
    console.say(f"written: {out / 'summary.json'}")


def train_here(job: Job, place: RunOptions, out: Path, live: LiveOutputs = NOTHING) -> Summary:
    """Train with local workers; the summary that rank 0 has written."""
    launch(job.workers, work, job, place, out, True, live)
    summary: Summary = json.loads((out / "summary.json").read_text())
    return summary


def work(job: Job, place: RunOptions, out: Path, force: bool, live: LiveOutputs = NOTHING) -> None:
    """One rank's part. Rank 0 shows progress and keeps the summary."""

    def watchers(worker: ProcessWorker) -> list[Callback]:
        if worker.rank:
            return []
        options.claim(out, force)
        latest, notes = worker.metrics_store.latest, place.emulation.notes()
        recorder = Recorder(job, "processes", out, latest, emulated=notes)
        return [Display(latest), recorder, *live.watchers(latest, worker.metrics_store.hosts)]

    run(job, place, watchers)
