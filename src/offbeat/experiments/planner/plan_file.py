"""A plan as a TOML file: `offbeat plan` writes it, `offbeat train` reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from offbeat.core.fields import Field, FieldError, Flag, Key, ListOf, Number, Text, Whole
from offbeat.core.files import write_atomic
from offbeat.core.settings import Settings, Table, build, lookup
from offbeat.core.strategy import Strategy
from offbeat.core.toml import read_toml, write_toml
from offbeat.core.units import parse_rate
from offbeat.errors import SettingError
from offbeat.experiments.tasks import Task
from offbeat.experiments.tasks import task as make_task
from offbeat.strategies import STRATEGIES
from offbeat.worlds.virtual.cluster import Cluster

MOST = (1 << 63) - 1
CIRCUMSTANCES = ("mtbf", "rejoin", "spot_trace", "price")  # of the plan, which training cannot choose


@dataclass(frozen=True)
class SettingsField(Field):
    """The settings of a strategy, by name; `Plan.check` builds the strategy from them."""

    @property
    def expected(self) -> str:
        return "a table of settings, such as { period = 8 }"

    def read(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise self.refuse(value)
        for key, each in value.items():
            if not isinstance(each, str | bool | int | float | None):
                raise FieldError((key,), f"expected a text, a number, true or false, not {each!r}")
        return {key: "none" if each is None else each for key, each in value.items()}  # TOML has no null


_TEXT = Text()
_COUNT = Whole(at_least=1)
_NUMBER = Number(noun="a finite number")
Name = Annotated[str, _TEXT]
Count = Annotated[int, _COUNT]
Finite = Annotated[float, _NUMBER]
StrategySettings = Annotated[Mapping[str, Any], SettingsField(), Key("settings")]


@dataclass(frozen=True, kw_only=True)
class Ranked(Settings):
    """`[[ranking]]`: a candidate and its result in virtual time; the first one was chosen."""

    strategy: Name
    strategy_settings: StrategySettings
    seconds_to_target: Annotated[float | None, _NUMBER] = None  # None: the target was not reached
    steps_to_target: Annotated[float | None, _NUMBER] = None
    seconds_per_step: Annotated[float | None, _NUMBER] = None
    seeds: Annotated[int | None, _COUNT] = None  # that it was tried with
    ratio: Annotated[float | None, _NUMBER] = None  # seconds, of the fastest one's; None: the fastest itself
    ratio_low: Annotated[float | None, _NUMBER] = None  # interval of the ratio, at 95%
    ratio_high: Annotated[float | None, _NUMBER] = None
    bytes_sent: Annotated[float | None, _NUMBER] = None  # by workers and server, until the target or the end
    value: Annotated[float | None, _NUMBER] = None  # as last evaluated
    goodput: Annotated[float | None, _NUMBER] = None  # samples per second that count, where workers fail
    cost: Annotated[float | None, _NUMBER] = None  # until the target, by the price
    fate: Name = ""  # why the target was not reached, if it was not
    risk: Name = ""


@dataclass(frozen=True, kw_only=True)
class Plan(Settings):
    """The chosen run. Keys that are left out have the task's default, or no effect."""

    task: Name
    model: Name
    batch_size: Count
    lr: Annotated[float | None, _NUMBER] = None  # None: as the optimizer of a user's own model has it
    strategy: Name
    strategy_settings: StrategySettings
    workers: Count
    steps: Count
    target: Finite
    seed: Annotated[int, Whole(at_least=-MOST, at_most=MOST)] = 0
    evaluate_every: Annotated[int | None, _COUNT] = None
    bandwidth: Annotated[str | None, _TEXT] = None  # emulated when planning, and again when training
    pace: Annotated[str | None, _TEXT] = None
    slow: Annotated[tuple[str, ...], ListOf(item=_TEXT, noun="a list of texts such as 2=4.0, not empty")] = ()
    device: Name = "cpu"
    cluster: Annotated[str | None, _TEXT] = None  # name or file, if the cluster was not measured
    elastic: Annotated[bool, Flag()] = False  # planned for workers that fail
    mtbf: Annotated[str | None, _TEXT] = None
    rejoin: Annotated[str | None, _TEXT] = None
    spot_trace: Annotated[str | None, _TEXT] = None
    price: Annotated[str | None, _TEXT] = None
    made_by: Name = ""
    ranking: Annotated[tuple[Ranked, ...], ListOf(item=Table(of=Ranked), noun="one or more [[ranking]]")] = ()
    measured: Annotated[Cluster | None, Table(of=Cluster, noun="a table [measured]")] = None

    def check(self) -> None:
        """Check names and settings, so that an error names the line of the file."""
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
        rate = {} if self.lr is None else {"lr": self.lr}
        return make_task(self.task, model=self.model, batch_size=self.batch_size, **rate)

    def make_strategy(self) -> Strategy[Any]:
        """Build the strategy with its settings."""
        return build(lookup("strategy", self.strategy, STRATEGIES), self.strategy_settings)

    def pairs(self) -> list[str]:
        """Return the strategy's settings as texts of the form key=value."""
        return [f"{key}={value}" for key, value in self.strategy_settings.items()]

    def notes(self, workers: int) -> list[str]:
        """Describe what makes a run with this many workers differ from the prediction."""
        return [] if workers == self.workers else [f"planned for {self.workers} workers, not for {workers}"]

    def options(self) -> dict[str, Any]:
        """Return the values that a command takes from the plan by default, under its parameters' names."""
        not_options = {"strategy_settings", "made_by", "ranking", "measured", *CIRCUMSTANCES}
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
