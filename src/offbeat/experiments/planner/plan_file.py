"""A plan as a TOML file: `offbeat plan` writes it, `offbeat train` reads it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from offbeat.core.files import write_atomic
from offbeat.core.settings import build, lookup
from offbeat.core.strategy import Strategy
from offbeat.core.toml import (
    Field,
    FieldError,
    Settings,
    number,
    read_toml,
    some,
    table,
    text,
    to_value,
    unfit,
    whole,
    write_toml,
)
from offbeat.errors import SettingError
from offbeat.experiments.tasks import Task
from offbeat.experiments.tasks import task as make_task
from offbeat.strategies import STRATEGIES
from offbeat.worlds.processes.pacing import parse_rate
from offbeat.worlds.virtual.cluster import Cluster

MOST = (1 << 63) - 1


def _read_settings(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise unfit(_SETTINGS.expected, value)
    for key, each in value.items():
        if not isinstance(each, str | bool | int | float):
            raise FieldError((key,), f"expected a text, a number, true or false, not {each!r}")
    return dict(value)


def _write_settings(settings: dict[str, Any]) -> str:
    written = [
        f"{key} = {str(v).lower() if isinstance(v, bool) else to_value(v)}" for key, v in settings.items()
    ]
    return f"{{ {', '.join(written)} }}" if written else "{}"


_SETTINGS = Field("a table of settings, such as { period = 8 }", _read_settings, _write_settings)
_TEXT = text("a text")
_COUNT = whole("a whole number, at least 1", 1, MOST)
Text = Annotated[str, _TEXT]
Count = Annotated[int, _COUNT]
MaybeText = Annotated[str | None, _TEXT]
MaybeCount = Annotated[int | None, _COUNT]
_NUMBER = number("a finite number", math.isfinite)
Number = Annotated[float, _NUMBER]
MaybeNumber = Annotated[float | None, _NUMBER]
SettingsTable = Annotated[Mapping[str, Any], _SETTINGS]


@dataclass(frozen=True, kw_only=True)
class Ranked(Settings):
    """`[[ranking]]`: a candidate and its result in virtual time; the first one was chosen."""

    strategy: Text
    settings: SettingsTable
    seconds_to_target: MaybeNumber = None  # None: the target was not reached
    bytes_sent: MaybeNumber = None  # until the target, or until the end of the run
    value: MaybeNumber = None  # as last evaluated
    fate: Text = ""  # how far it came, if not to the target
    risk: Text = ""


@dataclass(frozen=True, kw_only=True)
class Plan(Settings):
    """The chosen run. Keys that are left out have the task's default, or are not used."""

    task: Text
    model: Text
    batch_size: Count
    lr: Number
    strategy: Text
    settings: SettingsTable
    workers: Count
    steps: Count
    target: Number
    seed: Annotated[int, whole("a whole number", -MOST, MOST)] = 0
    evaluate_every: MaybeCount = None
    bandwidth: MaybeText = None  # emulated when planning, and again when training
    pace: MaybeText = None
    slow: Annotated[tuple[str, ...], some("a list of texts such as 2=4.0, not empty", _TEXT)] = ()
    device: Text = "cpu"
    cluster: MaybeText = None  # name or file, if the cluster was not measured
    made_by: Text = ""
    ranking: Annotated[tuple[Ranked, ...], some("one or more [[ranking]]", table("a table", Ranked))] = ()
    measured: Annotated[Cluster | None, table("a table [measured]", Cluster)] = None

    def check(self) -> None:
        """Look up names and settings here, so that an error names the line of the file."""
        lookups: dict[str, Callable[[], object]] = {
            "task": lambda: make_task(self.task),
            "model": lambda: make_task(self.task, model=self.model),
            "lr": self.make_task,
            "strategy": lambda: lookup("strategy", self.strategy, STRATEGIES),
            "settings": self.make_strategy,
            "bandwidth": lambda: self.bandwidth is None or parse_rate(self.bandwidth),
        }
        for key, look_up in lookups.items():
            try:
                look_up()
            except SettingError as problem:
                raise FieldError((key,), str(problem)) from None

    def make_task(self) -> Task:
        """Build the task."""
        return make_task(self.task, model=self.model, batch_size=self.batch_size, lr=self.lr)

    def make_strategy(self) -> Strategy[Any]:
        """Build the strategy with its settings."""
        return build(lookup("strategy", self.strategy, STRATEGIES), self.settings)

    def pairs(self) -> list[str]:
        """Return the strategy's settings as texts of the form key=value."""
        return [f"{key}={value}" for key, value in self.settings.items()]

    def notes(self, workers: int) -> list[str]:
        """Say what makes a run with this many workers differ from the prediction."""
        return [] if workers == self.workers else [f"planned for {self.workers} workers, not for {workers}"]

    def options(self) -> dict[str, Any]:
        """Return the values that a command takes from the plan by default, under its parameters' names."""
        not_options = {"settings", "made_by", "ranking", "measured"}
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in not_options}
        return {
            name: list(v) if isinstance(v, tuple) else v for name, v in values.items() if v not in (None, ())
        }


def load_plan(path: Path) -> Plan:
    """Read a plan file; errors name the file and the line."""
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SettingError(f"{path}: the plan cannot be read: {reason}") from None
    return read_toml(Plan, source, str(path))


def save_plan(path: Path, plan: Plan, header: str) -> None:
    """Write a plan file atomically, with `header` (a comment) before the plan."""
    write_atomic(path, header + write_toml(plan))
