"""offbeat compare: the same task under several strategies, one after the other, and a table."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from offbeat.cli import options
from offbeat.cli.progress import result_table
from offbeat.cli.train import train_here
from offbeat.errors import SettingError
from offbeat.strategies import STRATEGIES
from offbeat.summary import claim, write
from offbeat.train import Job
from offbeat.worlds.worker import Place


def compare_command(
    task: options.TaskName,
    strategies: Annotated[
        str, typer.Option(help="Names, separated by commas. [default: all]", show_default=False)
    ] = ",".join(STRATEGIES),
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of one strategy: name.key=value.")
    ] = None,
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
    timeout: options.Timeout = 300.0,
) -> None:
    """Train TASK under each strategy with real worker processes and print one table."""
    names = [name.strip() for name in strategies.split(",")]
    chosen = [options.strategy_of(name, settings_of(name, settings or [], names)) for name in names]
    what = options.task_of(task, model=model, batch_size=batch_size, lr=lr)
    emulation = options.emulation_of(bandwidth, pace, slow, workers)
    place = Place(data=data, timeout_s=timeout, emulation=emulation)
    out = options.out_of(out, "compare", task)
    claim(out, force)
    what.load(data)
    console = Console()
    for note in emulation.notes():
        console.print(note, style="yellow", highlight=False, markup=False)
    summaries = []
    for strategy in chosen:
        job = Job(
            task=what,
            strategy=strategy,
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
        summaries.append(train_here(job, place, out / strategy.name))
        write(out, summaries)  # after each: a run that is cut short keeps what it has
    console = Console()
    console.print(f"\n[bold]{task}[/] ({what.model}), {workers} workers", highlight=False)
    for note in emulation.notes():
        console.print(note, style="yellow", highlight=False, markup=False)
    console.print(result_table(summaries))
    console.print(f"written: {out / 'summary.json'}", highlight=False, markup=False)


def settings_of(name: str, settings: list[str], names: list[str]) -> list[str]:
    """Of `["local_sgd.period=8"]` what belongs to this strategy."""
    for pair in settings:
        if pair.partition(".")[0] not in names:
            raise SettingError(f"--set {pair!r}: write it as name.key=value, with a name out of {names}")
    return [pair.partition(".")[2] for pair in settings if pair.partition(".")[0] == name]
