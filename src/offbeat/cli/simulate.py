"""offbeat simulate: train a task on a cluster that need not exist."""

from __future__ import annotations

import json
import time
from collections import deque
from pathlib import Path

import torch

from offbeat.cli import options
from offbeat.cli.outputs import NOTHING, LiveOutputs
from offbeat.cli.progress import Display, report_interrupt, result_table, worker_table
from offbeat.cli.terminal import Terminal
from offbeat.core.ledger import Ledger, WorkerTotals
from offbeat.experiments import trace as timeline
from offbeat.experiments.callbacks.recorder import Recorder
from offbeat.experiments.loop import Callback, Job
from offbeat.experiments.summary import Summary, claim
from offbeat.experiments.tasks import Data
from offbeat.experiments.virtual_run import simulate
from offbeat.worlds.virtual.cluster import load_cluster

SHOWN_WORKERS = 16


def simulate_command(
    task: options.TaskName,
    cluster: options.ClusterName = "lan-1g",
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
    device: options.Device = "cpu",
    trace: options.Trace = None,
    log: options.Log = None,
    tensorboard: options.TensorBoard = None,
    dashboard: options.Dashboard = False,
    dashboard_port: options.DashboardPort = 0,
) -> None:
    """Train TASK on a virtual CLUSTER, in one process, and write summary.json.

    The model, the data and the gradients are real; the seconds are what the cluster would have taken.
    """
    job = Job(
        task=options.task_of(task, model=model, batch_size=batch_size, lr=lr),
        strategy=options.strategy_of(strategy, settings or []),
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
    load_cluster(cluster)
    options.check_device(device)
    options.check_file(trace)
    live = LiveOutputs(log=log, tensorboard=tensorboard, dashboard=dashboard, port=dashboard_port)
    live.check(force)
    out = options.out_of(out, task, strategy, "virtual")
    claim(out, force)
    samples = job.task.load(data).to(device)

    console = Terminal()
    began = time.monotonic()
    with report_interrupt(console, out / "summary.json"):
        summary = simulate_here(job, cluster, samples, out, device, trace, live)
    took = time.monotonic() - began
    if workers <= SHOWN_WORKERS:
        console.print(worker_table(summary))
    console.print(result_table([summary]))
    seconds = summary["seconds"]
    console.say(f"{seconds:.4g} virtual seconds in {took:.1f} real ones")
    console.say(f"written: {out / 'summary.json'}")


def simulate_here(
    job: Job,
    cluster: str,
    samples: Data,
    out: Path,
    device: torch.device | str = "cpu",
    trace: Path | None = None,
    live: LiveOutputs = NOTHING,
) -> Summary:
    """Simulate a job; the summary that was written."""
    described = load_cluster(cluster)
    books: list[Ledger] = []
    seen: list[Callback] = []

    def watchers(ledgers: list[Ledger]) -> list[Callback]:
        books.extend(ledgers)
        for ledger in ledgers[: None if trace else timeline.EXCERPT_WORKERS]:
            ledger.spans = [] if trace else deque(maxlen=timeline.EXCERPT_SPANS)

        def latest() -> list[WorkerTotals]:
            return [ledger.totals() for ledger in ledgers]

        notes = [f"virtual: {job.workers} workers on {cluster} ({described.summary})"]
        recorder = Recorder(job, "virtual", out, latest, cluster=cluster)
        seen.extend([Display(latest, notes), recorder, *live.watchers(latest)])
        return seen

    simulate(job, described, samples, watchers, device)
    workers = [list(ledger.spans or ()) for ledger in books]
    if trace is not None:
        timeline.write(trace, workers)
    for watcher in seen:
        watcher.ended(workers)
    summary: Summary = json.loads((out / "summary.json").read_text())
    return summary
