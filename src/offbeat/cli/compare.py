"""offbeat compare: train a task under several strategies and seeds; print a table, and write a report."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli import completion, options
from offbeat.cli.terminal import Terminal
from offbeat.errors import SettingError

WORLDS = {"processes": "real worker processes", "virtual": "virtual time on a described cluster"}
DEFAULT_CLUSTER = "lan-1g"
LONGEST_NAME = 100  # characters of a folder's name; some systems allow only 260 for the whole path


@options.expand_groups
def compare_command(
    task: options.TaskName,
    *,
    strategies: Annotated[
        str | None,
        typer.Option(
            "--strategies",
            "-s",
            metavar="NAME,…",
            autocompletion=completion.strategy_lists,
            help="Names, separated by commas; with settings: 'bsp,local_sgd(period=4)'. \\[default: all]",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME.KEY=VALUE", help="A setting of all strategies of a name."),
    ] = None,
    seeds: options.Seeds = "0",
    world: Annotated[
        str,
        typer.Option(
            "--world", metavar="WORLD", help="processes (real ones) or virtual (time on --cluster)."
        ),
    ] = "processes",
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            "-c",
            autocompletion=completion.cluster_names,
            metavar="NAME",
            help="With --world virtual: a preset or a TOML file. \\[default: lan-1g]",
        ),
    ] = None,
    until: options.Until = None,
    length: options.Length,
    seed: options.OneSeed = None,
    model: options.Model,
    course: options.Course,
    folders: options.Folders,
    emulated: options.Emulated,
    device: options.Device = "cpu",
    timeout: options.Timeout = 300.0,
    quiet: options.Quiet = False,
) -> None:
    """Train TASK under each strategy; print one table, and write summary.json and report.html.

    All strategies run with the first seed, then all with the next one, so that a machine that is slow for a
    while slows down all strategies alike.
    """
    from offbeat.cli import parse
    from offbeat.cli.outputs import RunCallbacks
    from offbeat.cli.progress import report_interrupt, virtual_note
    from offbeat.cli.tables import comparison_table
    from offbeat.core.settings import lookup
    from offbeat.experiments.process_run import RunOptions, train_here
    from offbeat.experiments.report.aggregate import grouped, remarks
    from offbeat.experiments.report.page import write_page
    from offbeat.experiments.report.verdict import by_time_to_target, losses, run_result, verdict
    from offbeat.experiments.summary import Summary, write_summary
    from offbeat.experiments.virtual_run import simulate_here
    from offbeat.strategies import STRATEGIES
    from offbeat.worlds.virtual.cluster import load_cluster

    chosen = parse.strategies_of(strategies or ",".join(STRATEGIES.load()[0]), settings or [])
    labels = [
        group.label for group in grouped([{"strategy": s.name, "settings": s.settings()} for s in chosen])
    ]
    run_folders = folder_names(labels)
    task_to_train = parse.task_of(task, model)
    lookup("world", world, WORLDS)
    emulation = parse.emulation_of(emulated, length.workers)
    if world == "virtual" and emulation.notes():
        raise SettingError("--bandwidth, --pace and --slow are for real processes: describe a --cluster")
    if world == "processes" and cluster is not None:
        raise SettingError(f"--cluster {cluster} is for --world virtual")
    if world == "processes" and until is not None:
        raise SettingError(f"--until {until} is for --world virtual")
    until_s = parse.until_of(until)
    cluster = cluster or DEFAULT_CLUSTER
    load_cluster(cluster)
    options.check_device(device)
    run_options = RunOptions(data=folders.data, device=device, timeout_s=timeout, emulation=emulation)
    out = parse.out_of(folders.out, "compare", task)
    jobs = [
        parse.job_of(task_to_train, strategy, each, length, course)
        for each in (parse.seeds_of(seeds) if seed is None else [seed])
        for strategy in chosen
    ]
    options.claim(out, folders.force)
    data = task_to_train.load(folders.data).to(device)
    console = Terminal()
    shown = options.LiveOutputs(quiet=quiet)
    summaries: list[Summary] = []
    with report_interrupt(console, out / "summary.json", out / "report.html"):
        for number, job in enumerate(jobs):
            label = labels[number % len(chosen)]
            run = f"run {number + 1} of {len(jobs)}: {label}, seed {job.seed}"
            folder = Path(run_folders[number % len(chosen)]) / f"seed-{job.seed}"
            if not quiet:
                console.tell(f"{run} …")
            (out / folder / "summary.json").unlink(missing_ok=True)  # exists only if --force was given
            try:
                if world == "virtual":
                    callbacks = RunCallbacks(shown)
                    simulate_here(job, cluster, data, out / folder, callbacks, device, until_s=until_s)
                else:
                    train_here(job, run_options, out / folder, RunCallbacks(shown))
            finally:  # also after an interrupt, with the results so far
                if (out / folder / "summary.json").exists():
                    known = json.loads((out / folder / "summary.json").read_text())
                    summaries.append({**known, "folder": folder.as_posix()})
                    is_below = console.is_terminal and not quiet  # the line that names the run
                    console.tell(f"  {run_result(known)}" if is_below else f"{run}: {run_result(known)}")
                    write_summary(out, summaries)
                    write_page(out / "report.html", [out])
    groups = by_time_to_target(grouped(summaries))
    seed_count = len(jobs) // len(chosen)
    shown_seeds = "1 seed" if seed_count == 1 else f"{seed_count} seeds; mean ± standard deviation"
    console.print(f"\n[bold]{task}[/] ({task_to_train.model}), {length.workers} workers, {shown_seeds}")
    for note in emulation.notes() if world == "processes" else [virtual_note(length.workers, cluster)]:
        console.warn(note)
    console.show(comparison_table(groups))
    for remark in [*remarks(groups), *losses(groups).values()]:
        console.warn(remark)
    if sentence := verdict(groups):
        console.tell(f"\n{sentence}", style="bold")
    for name in ("summary.json", "report.html"):
        console.say(f"written: {out / name}")


def folder_names(labels: list[str]) -> list[str]:
    """Make a folder name per label, safe on any file system: plain, short, and unique even without case."""
    names: list[str] = []
    for label in labels:
        name = plain = re.sub(r"[^a-z0-9_.]+", "-", label.lower())[:LONGEST_NAME].strip("-.")
        number = 1
        while name in names:  # such as x=1 and x=-1
            number += 1
            name = f"{plain}--{number}"
        names.append(name)
    return names
