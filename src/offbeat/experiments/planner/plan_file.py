"""A plan as a TOML file: `offbeat plan` writes it, `offbeat train --from FILE` reads it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

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
from offbeat.core.units import parse_rate
from offbeat.errors import SettingError
from offbeat.experiments.summary import write_atomic
from offbeat.experiments.tasks import Task
from offbeat.experiments.tasks import task as make_task
from offbeat.strategies import STRATEGIES
from offbeat.worlds.virtual.cluster import Cluster

HEADER = (
    "# Made by `offbeat plan`. To train so: offbeat train --from THIS-FILE; options given there count more.\n"
)
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
    """`[[ranking]]`: a candidate, and what virtual time said of it; the first one was chosen."""

    strategy: Text
    settings: SettingsTable
    seconds_to_target: MaybeNumber = None  # None: it did not get there
    bytes_sent: MaybeNumber = None  # until then, or until its end
    value: MaybeNumber = None  # as last evaluated
    fate: Text = ""  # what became of it, if it did not get there
    risk: Text = ""


@dataclass(frozen=True, kw_only=True)
class Plan(Settings):
    """What to train and how. What is left out is the task's own choice, or nothing."""

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
    bandwidth: MaybeText = None  # what was emulated, and will be again
    pace: MaybeText = None
    slow: Annotated[tuple[str, ...], some("a list of texts such as 2=4.0, not empty", _TEXT)] = ()
    device: Text = "cpu"
    cluster: MaybeText = None  # its name or file, where it was not measured
    made_by: Text = ""
    ranking: Annotated[tuple[Ranked, ...], some("one or more [[ranking]]", table("a table", Ranked))] = ()
    measured: Annotated[Cluster | None, table("a table [measured]", Cluster)] = None

    def check(self) -> None:
        """Names and settings are looked up here, so that a mistake is told with its line."""
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
        return make_task(self.task, model=self.model, batch_size=self.batch_size, lr=self.lr)

    def make_strategy(self) -> Strategy[Any]:
        return build(lookup("strategy", self.strategy, STRATEGIES), self.settings)

    def pairs(self) -> list[str]:
        """The settings as `--set` takes them."""
        return [f"{key}={value}" for key, value in self.settings.items()]

    def notes(self, workers: int) -> list[str]:
        """What a reader must know before comparing what comes of it with what was predicted."""
        return [] if workers == self.workers else [f"planned for {self.workers} workers, not for {workers}"]

    def options(self) -> dict[str, Any]:
        """By their names in the commands: what those take from here, unless it is given to them."""
        own = {"settings", "made_by", "ranking", "measured"}
        known = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in own}
        return {
            name: list(v) if isinstance(v, tuple) else v for name, v in known.items() if v not in (None, ())
        }


def load_plan(path: Path) -> Plan:
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SettingError(f"{path}: the plan cannot be read: {reason}") from None
    return read_toml(Plan, source, str(path))


def save_plan(path: Path, plan: Plan) -> None:
    """Whole or not at all."""
    write_atomic(path, HEADER + write_toml(plan))
