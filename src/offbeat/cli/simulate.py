"""offbeat simulate: train a task on a cluster that need not exist."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer
from rich.console import Console

from offbeat import trace as timeline
from offbeat.cli import options
from offbeat.cli.progress import Display, result_table, worker_table
from offbeat.cli.recorder import Recorder
from offbeat.ledger import Entry, Ledger
from offbeat.summary import claim
from offbeat.train import Job, Watcher
from offbeat.worlds.costs import load_cluster
from offbeat.worlds.virtual import simulate

SHOWN_WORKERS = 16


def simulate_command(
    task: options.TaskName,
    cluster: Annotated[str, typer.Option(help="A preset (see `offbeat list`) or a TOML file.")] = "lan-1g",
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
    described = load_cluster(cluster)
    options.check_device(device)
    options.check_file(trace)
    out = options.out_of(out, task, strategy, "virtual")
    claim(out, force)
    samples = job.task.load(data).to(device)

    books: list[Ledger] = []

    def watchers(ledgers: list[Ledger]) -> list[Watcher]:
        books.extend(ledgers)
        for ledger in ledgers:
            ledger.spans = None if trace is None else []

        def latest() -> list[Entry]:
            return [ledger.entry() for ledger in ledgers]

        notes = [f"virtual: {workers} workers on {cluster} ({described.summary})"]
        return [Display(latest, notes), Recorder(job, "virtual", out, latest, cluster=cluster)]

    began = time.monotonic()
    simulate(job, described, samples, watchers, device)
    took = time.monotonic() - began
    if trace is not None:
        timeline.write(trace, [ledger.spans or [] for ledger in books])
    summary = json.loads((out / "summary.json").read_text())
    console = Console()
    if workers <= SHOWN_WORKERS:
        console.print(worker_table(summary))
    console.print(result_table([summary]))
    seconds = summary["seconds"]
    console.print(f"{seconds:.4g} virtual seconds in {took:.1f} real ones", highlight=False)
    console.print(f"written: {out / 'summary.json'}", highlight=False, markup=False)
