"""The options that several commands share, and what they mean."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from offbeat.core.settings import build, lookup, parse_pairs, split
from offbeat.core.strategy import Strategy
from offbeat.core.units import parse_rate, seconds_of
from offbeat.errors import SettingError
from offbeat.experiments.planner.plan_file import Plan, load_plan
from offbeat.experiments.tasks import Task
from offbeat.experiments.tasks import task as make_task
from offbeat.strategies import STRATEGIES
from offbeat.worlds.processes.emulation import Emulation

TaskName = Annotated[str, typer.Argument(metavar="TASK", help="What to train; see `offbeat list`.")]
StrategyName = Annotated[str, typer.Option("--strategy", help="How workers exchange; see `offbeat list`.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="A setting of the strategy: key=value. May be repeated.")
]
Workers = Annotated[int, typer.Option(help="Local workers to start (under torchrun: its own number counts).")]
Epochs = Annotated[int | None, typer.Option(help="Passes over the data. [default: the task's]")]
Steps = Annotated[int | None, typer.Option(help="Steps of each worker, instead of epochs.")]
Seed = Annotated[int, typer.Option(help="Of weights, data order and noise.")]
Model = Annotated[str | None, typer.Option(help="One of the task's models. [default: its first]")]
BatchSize = Annotated[int | None, typer.Option(help="Samples a worker and step. [default: the task's]")]
LearningRate = Annotated[float | None, typer.Option("--lr", help="Learning rate. [default: the task's]")]
Target = Annotated[float | None, typer.Option(help="Note the training seconds at which this is reached.")]
EvaluateEvery = Annotated[int | None, typer.Option(help="Steps between evaluations. [default: an epoch]")]
Order = Annotated[
    str, typer.Option(help="Who draws which samples: shuffled, seldp (round a ring of chunks) or defdp.")
]
Skew = Annotated[int | None, typer.Option(help="Classes in a worker's chunk of the data. [default: all]")]
Inject = Annotated[
    str | None, typer.Option(help="Data injection ALPHA,BETA: a share of workers lends a share of its batch.")
]
DataFolder = Annotated[
    Path | None, typer.Option("--data", help="Folder of the data sets. [default: OFFBEAT_DATA]")
]
Out = Annotated[Path | None, typer.Option(help="Folder for summary.json. [default: runs/TASK-…]")]
Force = Annotated[bool, typer.Option(help="Overwrite the results in --out.")]
Bandwidth = Annotated[str | None, typer.Option(help="Emulate: slow every rank's network, e.g. 100mbit.")]
Pace = Annotated[str | None, typer.Option(help="Emulate: a step computes for at least this, e.g. 40ms.")]
Slow = Annotated[list[str] | None, typer.Option(help="Emulate: RANK=FACTOR, e.g. 2=4.0. May be repeated.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Trace = Annotated[Path | None, typer.Option(help="Write a timeline for Perfetto (Chrome trace format).")]
ClusterName = Annotated[str, typer.Option("--cluster", help="A preset (see `offbeat list`) or a TOML file.")]
Log = Annotated[Path | None, typer.Option(help="Write a line of JSON for every step of rank 0.")]
TensorBoard = Annotated[Path | None, typer.Option(help="Folder for TensorBoard logs.")]
Dashboard = Annotated[bool, typer.Option("--dashboard", help="Serve a page on this machine while it trains.")]
DashboardPort = Annotated[
    int, typer.Option(help="Port of that page. [default: any free one]", min=0, max=65535)
]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for another rank before giving up.")]


def take_from(context: typer.Context, file: Path | None) -> Path | None:
    """What a plan says counts as the default of each option: what is given beside it counts more."""
    if file is not None:
        context.default_map = {**load_plan(file).options()}
    return file


From = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="Take everything from this file of `offbeat plan`, TASK too; options given here count more.",
        callback=take_from,
        is_eager=True,  # before the options whose defaults it sets
    ),
]


def planned(file: Path | None, task: str, strategy: str) -> Plan | None:
    """The plan, if there is one for this task; without its settings, if they are another strategy's."""
    if file is None:
        return None
    plan = load_plan(file)
    if plan.task != task:
        raise SettingError(f"{file} is a plan for {plan.task}, not for {task}: leave TASK out, or --from")
    return plan if plan.strategy == strategy else replace(plan, strategy=strategy, strategy_settings={})


def check_device(name: str) -> None:
    """Refuse a device that is not here."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as problem:
        raise SettingError(f"--device {name!r} cannot be used: {str(problem).splitlines()[0]}") from problem


def check_file(path: Path | None) -> None:
    """Refuse a file that could not be written, before the run that is to fill it."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise SettingError(f"{path} cannot be written: {problem}") from problem
    if path.is_dir():
        raise SettingError(f"{path} is a folder: give a file")


def claim(folder: Path, force: bool) -> None:
    """Refuse a folder that already holds results, or that cannot be one."""
    if folder.exists() and not folder.is_dir():
        raise SettingError(f"--out {folder} is a file: give a folder")
    if (folder / "summary.json").exists() and not force:
        raise SettingError(f"{folder} already holds a summary.json: choose another --out, or give --force")


def strategy_of(name: str, settings: Iterable[str]) -> Strategy[Any]:
    return build(lookup("strategy", name, STRATEGIES), parse_pairs(settings))


def strategies_of(text: str, settings: Iterable[str]) -> list[Strategy[Any]]:
    """`bsp,local_sgd(period=4)` as strategies. `settings` (`local_sgd.period=8`) are for all of that name;
    what stands in parentheses comes first."""
    variants = [_variant(part) for part in split(text)]
    names = [name for name, _ in variants]
    shared: dict[str, list[str]] = {name: [] for name in names}
    for pair in settings:
        name, _, setting = pair.partition(".")
        if name not in shared:
            known = list(dict.fromkeys(names))
            raise SettingError(f"--set {pair!r}: write it as name.key=value, with a name out of {known}")
        shared[name].append(setting)
    chosen = [strategy_of(name, [*shared[name], *own]) for name, own in variants]
    for number, one in enumerate(chosen):
        if one in chosen[:number]:
            raise SettingError(
                f"--strategies {text!r}: {names[number]} is there twice with the same settings"
            )
    return chosen


def _variant(text: str) -> tuple[str, list[str]]:
    """`local_sgd(period=4)` as its name and its settings."""
    match = re.fullmatch(r"([^()]*)(?:\((.*)\))?", text)
    pairs = split(match[2]) if match and match[2] else []
    if not match or not all(re.fullmatch(r"[\w-]+ *=.+", pair) for pair in pairs):
        raise SettingError(f"--strategies {text!r}: write settings as key=value, such as local_sgd(period=4)")
    return match[1].strip(), pairs


def task_of(name: str, **settings: Any) -> Task:
    """The task; settings that are None keep its defaults."""
    given = {key: value for key, value in settings.items() if value is not None}
    return make_task(name, **given)


def emulation_of(bandwidth: str | None, pace: str | None, slow: list[str] | None, workers: int) -> Emulation:
    if bandwidth is not None:
        parse_rate(bandwidth)
    factors = dict(_slowness(text, workers) for text in slow or [])
    try:
        pace_s = seconds_of(pace) if pace else None
    except SettingError as problem:
        raise SettingError(f"--pace {problem}") from None
    return Emulation(bandwidth=bandwidth, pace_s=pace_s, slow=factors)


def shares_of(text: str | None) -> tuple[float, float] | None:
    """0.5,0.5 as two shares."""
    if text is None:
        return None
    try:
        alpha, beta = (float(part) for part in text.split(","))
    except ValueError as problem:
        raise SettingError(f"--inject {text!r}: write two shares, such as 0.5,0.5") from problem
    return alpha, beta


def seeds_of(text: str) -> list[int]:
    """0,1,2 as seeds, each once."""
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError as problem:
        raise SettingError(f"--seeds {text!r}: write whole numbers, such as 0,1,2") from problem
    if len(set(seeds)) < len(seeds):
        raise SettingError(f"--seeds {text!r}: each seed once, or the same run would count twice")
    return seeds


def out_of(out: Path | None, *names: str) -> Path:
    return out or Path("runs") / f"{'-'.join(names)}-{datetime.now():%Y%m%d-%H%M%S}"


def _slowness(text: str, workers: int) -> tuple[int, float]:
    match = re.fullmatch(r"(\d+)=(\d+(?:\.\d+)?)", text)
    if not match or float(match[2]) < 1:
        raise SettingError(f"--slow {text!r}: write RANK=FACTOR with a factor of at least 1, such as 2=4.0")
    if int(match[1]) >= workers:
        raise SettingError(f"--slow {text!r}: there is no rank {match[1]} among {workers} workers")
    return int(match[1]), float(match[2])
