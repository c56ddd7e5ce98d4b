"""The options of the commands, each declared once, and the groups that several commands share.

A group is a dataclass whose fields are options. A command takes groups as arguments and is decorated with
`expand_groups`, which puts the group's options in the place of the argument:

    @expand_groups
    def train_command(task: TaskName, *, length: Length, seed: Seed = 0) -> None: ...
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from offbeat.cli.completion import cluster_names, strategy_names, task_names
from offbeat.errors import SettingError

TaskName = Annotated[
    str,
    typer.Argument(
        metavar="TASK",
        help="The task to train; see `offbeat list`. Your own model: package.module:build or file.py:build.",
        autocompletion=task_names,
    ),
]
StrategyName = Annotated[
    str,
    typer.Option(
        "--strategy",
        "-s",
        metavar="NAME",
        help="How workers synchronize; see `offbeat list`.",
        autocompletion=strategy_names,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting of the strategy. May be repeated."),
]
Workers = Annotated[
    int,
    typer.Option(
        "--workers",
        "-w",
        metavar="N",
        help="Number of workers; under torchrun, that of its ranks.",
    ),
]
Epochs = Annotated[
    int | None,
    typer.Option("--epochs", "-e", metavar="N", help="Passes over the data. \\[default: the task's]"),
]
Steps = Annotated[int | None, typer.Option(metavar="N", help="Steps of each worker, instead of epochs.")]
Seed = Annotated[int, typer.Option(metavar="N", help="Seed of weights, data order and noise.")]
Seeds = Annotated[
    str, typer.Option(metavar="N,N,…", help="Run each strategy with each of these seeds: 0,1,2.")
]
OneSeed = Annotated[int | None, typer.Option(metavar="N", help="One seed, instead of --seeds.")]
ModelName = Annotated[
    str | None, typer.Option(metavar="NAME", help="One of the task's models. \\[default: its first]")
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        "--batch-size", "-b", metavar="N", help="Samples per worker and step. \\[default: the task's]"
    ),
]
LearningRate = Annotated[
    float | None, typer.Option("--lr", metavar="RATE", help="Learning rate. \\[default: the task's]")
]
Target = Annotated[
    float | None,
    typer.Option(
        "--target",
        "-t",
        metavar="VALUE",
        help="Value of the metric; record the training seconds to reach it.",
    ),
]
EvaluateEvery = Annotated[
    int | None, typer.Option(metavar="N", help="Steps between evaluations. \\[default: an epoch]")
]
Schedule = Annotated[
    str,
    typer.Option(
        "--schedule",
        metavar="SCHEDULE",
        help="Learning rate over the run: constant, or cosine (rises shortly, then falls to 0).",
    ),
]
Order = Annotated[
    str,
    typer.Option(
        "--order",
        metavar="ORDER",
        help="Which worker draws which samples: shuffled, seldp (chunk after chunk) or defdp.",
    ),
]
Skew = Annotated[
    int | None, typer.Option(metavar="N", help="Classes in a worker's chunk of the data. \\[default: all]")
]
Work = Annotated[
    str | None,
    typer.Option(
        "--work",
        metavar="WORK",
        help="shared: fast workers do more of the batches; equal: each does equally many. "
        "\\[default: shared, if the strategy does not move in step]",
    ),
]
Inject = Annotated[
    str | None,
    typer.Option(
        metavar="ALPHA,BETA", help="Data injection: a fraction of workers lends a fraction of its batch."
    ),
]
DataFolder = Annotated[
    Path | None,
    typer.Option("--data", "-d", metavar="DIR", help="Folder of the data sets. \\[default: OFFBEAT_DATA]"),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="DIR", help="Folder for summary.json. \\[default: runs/TASK-…]"),
]
Force = Annotated[bool, typer.Option("--force", "-f", help="Overwrite the results in --out.")]
Bandwidth = Annotated[
    str | None, typer.Option(metavar="RATE", help="Emulate a slower network of every rank, e.g. 100mbit.")
]
Pace = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Emulate slower computation: least time per step, e.g. 40ms."),
]
Slow = Annotated[
    list[str] | None,
    typer.Option(metavar="RANK=FACTOR", help="Emulate a straggler, e.g. 2=4.0. May be repeated."),
]
Device = Annotated[str, typer.Option(metavar="NAME", help="cpu or cuda.")]
Timeout = Annotated[
    float, typer.Option(metavar="SECONDS", help="Seconds to wait for another rank before giving up.")
]
Trace = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a timeline for Perfetto (Chrome trace format).")
]
Until = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="End at this virtual time, e.g. 2h, if not all steps are done before."),
]
_SPOT_HELP = "Workers are away as a trace of spot preemptions says (SkyPilot's JSON)."
SpotTraceFile = Annotated[Path | None, typer.Option("--spot-trace", metavar="FILE", help=_SPOT_HELP)]
PlanTrace = Annotated[
    Path | None, typer.Option("--trace", "--spot-trace", metavar="FILE", help=_SPOT_HELP)
]  # a plan writes no timeline, so the short name is free
Mtbf = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Workers die: mean time between the failures of one, e.g. 2h."),
]
Rejoin = Annotated[
    str | None, typer.Option(metavar="TIME", help="Time from a death to the worker's return, e.g. 90s.")
]
HourPrice = Annotated[
    str | None, typer.Option("--price", metavar="PRICE", help="What a machine costs: 1.2/h or $1.2/h.")
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Show no progress, only results, warnings and errors.")
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Do not encrypt connections to a parameter server on other hosts.")
]
ElasticFlag = Annotated[
    bool,
    typer.Option(
        "--elastic", help="Go on without workers that die, and let them rejoin when they are started again."
    ),
]
Minimum = Annotated[
    int, typer.Option(metavar="N", help="With --elastic: stop if fewer workers are left.", min=1)
]
Restarts = Annotated[
    int, typer.Option(metavar="N", help="With --elastic: how often a worker is started again.", min=0)
]
ClusterName = Annotated[
    str,
    typer.Option(
        "--cluster",
        "-c",
        metavar="NAME",
        help="A preset (see `offbeat list`) or a TOML file.",
        autocompletion=cluster_names,
    ),
]
LogFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="File for a line of JSON per step of rank 0.")
]
TensorBoardFolder = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for TensorBoard logs.")]
ShowDashboard = Annotated[
    bool, typer.Option("--dashboard", help="Serve a live page on this machine during training.")
]
DashboardPort = Annotated[
    int,
    typer.Option(
        metavar="PORT",
        help="TCP port of the dashboard, which it turns on. \\[default: any free one]",
        show_default=False,
        min=0,
        max=65535,
    ),
]


def _use_plan(context: typer.Context, file: Path | None) -> Path | None:
    """Make the values of a plan the defaults of the options; options given explicitly take precedence."""
    if file is not None:
        from offbeat.experiments.planner.plan_file import load_plan

        context.default_map = {**load_plan(file).options()}
    return file


From = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="Take TASK and options from a file of `offbeat plan`; options given here take precedence.",
        callback=_use_plan,
        is_eager=True,  # before the options whose defaults it sets
    ),
]


@dataclass(frozen=True, kw_only=True)
class Length:
    """Options for the number of workers and the length of training."""

    workers: Workers = 4
    epochs: Epochs = None
    steps: Steps = None


@dataclass(frozen=True, kw_only=True)
class Model:
    """Options for the task's model and its hyperparameters."""

    model: ModelName = None
    batch_size: BatchSize = None
    lr: LearningRate = None


@dataclass(frozen=True, kw_only=True)
class Course:
    """Options for evaluation, for learning rates, and for which worker draws which samples."""

    target: Target = None
    evaluate_every: EvaluateEvery = None
    schedule: Schedule = "constant"
    order: Order = "shuffled"
    skew: Skew = None
    inject: Inject = None
    work: Work = None


@dataclass(frozen=True, kw_only=True)
class Folders:
    """Options for the folder to read data from and the folder to write results to."""

    data: DataFolder = None
    out: Out = None
    force: Force = False


@dataclass(frozen=True, kw_only=True)
class Emulated:
    """Options for a slower network and slower computation than the machine has."""

    bandwidth: Bandwidth = None
    pace: Pace = None
    slow: Slow = None


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """Options for workers that die and come back."""

    elastic: ElasticFlag = False
    minimum: Minimum = 1


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Options for machines that fail, and for what machines cost."""

    mtbf: Mtbf = None
    rejoin: Rejoin = None
    price: HourPrice = None


@dataclass(frozen=True, kw_only=True)
class LiveOutputs:
    """Options for what a run shows and writes while it trains."""

    log: LogFile = None
    tensorboard: TensorBoardFolder = None
    dashboard: ShowDashboard = False
    dashboard_port: DashboardPort = 0
    quiet: Quiet = False

    def check(self, force: bool) -> None:
        """Raise an error if an output cannot be written or would overwrite a file, before training starts."""
        if self.log is not None:
            check_new_file(self.log, force, "--log")
        if self.tensorboard is not None:
            if find_spec("tensorboard") is None:
                raise SettingError(
                    "--tensorboard needs the package tensorboard: pip install 'offbeat[tensorboard]'"
                )
            if self.tensorboard.exists() and not self.tensorboard.is_dir():
                raise SettingError(f"--tensorboard {self.tensorboard} is a file: give a folder")


def expand_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each argument of `command` that is a group by the group's options, in order."""
    signature = inspect.signature(command, eval_str=True)
    annotations: dict[str, Any] = {name: p.annotation for name, p in signature.parameters.items()}
    groups: dict[str, Any] = {name: a for name, a in annotations.items() if is_dataclass(a)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        expanded = _options_of(groups[name]) if name in groups else [parameter]
        parameters += [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in expanded]

    @functools.wraps(command)
    def expanded_command(**values: Any) -> None:
        arguments = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**values, **arguments)

    expanded_command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    expanded_command.__annotations__ = {p.name: p.annotation for p in parameters}
    return expanded_command


def _options_of(group: Any) -> list[inspect.Parameter]:
    """Return the fields of a group as parameters of a command."""
    return list(inspect.signature(group, eval_str=True).parameters.values())


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Put the name of an option before the message of an error about its value."""
    try:
        yield
    except SettingError as error:
        raise SettingError(f"{option} {error}") from error


def check_device(name: str) -> None:
    """Raise an error if this machine does not have the device."""
    import torch

    try:
        torch.empty(1, device=torch.device(name))
    except (RuntimeError, AssertionError) as error:
        raise SettingError(f"--device {name!r} cannot be used: {str(error).splitlines()[0]}") from error


def check_file(path: Path | None) -> None:
    """Raise an error if a file cannot be written, before the run that fills it."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"{path} cannot be written: {error}") from error
    if path.is_dir():
        raise SettingError(f"{path} is a folder: give a file")


def check_new_file(path: Path, force: bool, option: str = "--out") -> None:
    """Raise an error if a file cannot be written, or exists and --force was not given."""
    check_file(path)
    if path.exists() and not force:
        raise SettingError(f"{path} exists: choose another {option}, or give --force")


def claim(folder: Path, force: bool) -> None:
    """Raise an error if a folder already holds results (and --force was not given), or is a file."""
    if folder.exists() and not folder.is_dir():
        raise SettingError(f"--out {folder} is a file: give a folder")
    if (folder / "summary.json").exists() and not force:
        raise SettingError(f"{folder} already holds a summary.json: choose another --out, or give --force")
