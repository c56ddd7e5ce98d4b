"""offbeat compare: the same task under several strategies and seeds, in turn; a table and a page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli import options
from offbeat.cli.progress import comparison_table, report_interrupt
from offbeat.cli.report import write_page
from offbeat.cli.simulate import simulate_here
from offbeat.cli.terminal import Terminal
from offbeat.cli.train import train_here
from offbeat.core.settings import lookup
from offbeat.errors import SettingError
from offbeat.experiments.loop import Job
from offbeat.experiments.process_run import RunOptions
from offbeat.experiments.report.aggregate import grouped, remarks
from offbeat.experiments.summary import Summary, write
from offbeat.strategies import STRATEGIES
from offbeat.worlds.virtual.cluster import load_cluster

WORLDS = {"processes": "real worker processes", "virtual": "virtual time on a described cluster"}
LONGEST_NAME = 100  # of a folder; file systems allow 255 bytes, and some the whole path not much more


def compare_command(
    task: options.TaskName,
    strategies: Annotated[
        str,
        typer.Option(
            help="Names, separated by commas; with settings: 'bsp,local_sgd(period=4),local_sgd(period=16)'. "
            "[default: all]",
            show_default=False,
        ),
    ] = ",".join(STRATEGIES),
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of all of that name: name.key=value.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="One run of each strategy for each of these: 0,1,2.")] = "0",
    world: Annotated[
        str, typer.Option(help="processes (real ones) or virtual (on --cluster).")
    ] = "processes",
    cluster: Annotated[
        str | None, typer.Option(help="In the virtual world: a preset or a TOML file. [default: lan-1g]")
    ] = None,
    workers: options.Workers = 4,
    epochs: options.Epochs = None,
    steps: options.Steps = None,
    seed: Annotated[int | None, typer.Option(help="One seed: the same as --seeds.")] = None,
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
) -> None:
    """Train TASK under each strategy; print one table, and write summary.json and report.html.

    The runs take turns (every strategy with the first seed, then with the next one), so that a machine that
    is slower for a while is slower for all.
    """
    chosen = options.strategies_of(strategies, settings or [])
    labels = [
        group.label for group in grouped([{"strategy": s.name, "settings": s.settings()} for s in chosen])
    ]
    folders = folder_names(labels)
    what = options.task_of(task, model=model, batch_size=batch_size, lr=lr)
    lookup("world", world, WORLDS)
    emulation = options.emulation_of(bandwidth, pace, slow, workers)
    if world == "virtual" and emulation.notes():
        raise SettingError("--bandwidth, --pace and --slow are for real processes: describe a --cluster")
    if world == "processes" and cluster is not None:
        raise SettingError(f"--cluster {cluster} is for --world virtual")
    load_cluster(cluster or "lan-1g")
    options.check_device(device)
    place = RunOptions(data=data, device=device, timeout_s=timeout, emulation=emulation)
    out = options.out_of(out, "compare", task)
    jobs = [
        Job(
            task=what,
            strategy=strategy,
            workers=workers,
            seed=each,
            epochs=epochs,
            steps=steps,
            evaluate_every=evaluate_every,
            target=target,
            order=order,
            skew=skew,
            inject=options.shares_of(inject),
        )
        for each in (options.seeds_of(seeds) if seed is None else [seed])
        for strategy in chosen
    ]
    options.claim(out, force)
    samples = what.load(data).to(device)
    console = Terminal()
    for note in emulation.notes():
        console.warn(note)
    summaries: list[Summary] = []
    with report_interrupt(console, out / "summary.json", out / "report.html"):
        for number, job in enumerate(jobs):
            label = labels[number % len(chosen)]
            folder = Path(folders[number % len(chosen)]) / f"seed-{job.seed}"
            console.say(f"run {number + 1} of {len(jobs)}: {label}, seed {job.seed}")
            (out / folder / "summary.json").unlink(missing_ok=True)  # --force was given, or it is not there
            try:
                if world == "virtual":
                    simulate_here(job, cluster or "lan-1g", samples, out / folder, device)
                else:
                    train_here(job, place, out / folder)
            finally:  # also if it is cut short: what is known is kept
                if (out / folder / "summary.json").exists():
                    known = json.loads((out / folder / "summary.json").read_text())
                    summaries.append({**known, "folder": folder.as_posix()})
                    write(out, summaries)
                    write_page(out / "report.html", [out])
    groups = grouped(summaries)
    console.print(
        f"\n[bold]{task}[/] ({what.model}), {workers} workers, {len(jobs) // len(chosen)} seeds; "
        "mean ± standard deviation"
    )
    for note in emulation.notes():
        console.warn(note)
    console.print(comparison_table(groups))
    for remark in remarks(groups):
        console.warn(remark)
    for name in ("summary.json", "report.html"):
        console.say(f"written: {out / name}")


def folder_names(labels: list[str]) -> list[str]:
    """A name a label, safe on any file system: plain letters, not too many, and none alike in any case."""
    names: list[str] = []
    for label in labels:
        name = plain = re.sub(r"[^a-z0-9_.]+", "-", label.lower())[:LONGEST_NAME].strip("-.")
        number = 1
        while name in names:  # such as x=1 and x=-1
            number += 1
            name = f"{plain}--{number}"
        names.append(name)
    return names
