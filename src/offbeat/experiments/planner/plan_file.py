"""A plan as a TOML file: `offbeat plan` writes it, `offbeat train --from FILE` reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from offbeat.core.fields import Field, FieldError, Key, ListOf, Number, Text, Whole
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

HEADER = (
    "# Made by `offbeat plan`. To train so: offbeat train --from THIS-FILE; options given there count more.\n"
)
MOST = (1 << 63) - 1


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
            if not isinstance(each, str | bool | int | float):
                raise FieldError((key,), f"expected a text, a number, true or false, not {each!r}")
        return dict(value)


_TEXT = Text()
_COUNT = Whole(at_least=1)
_NUMBER = Number(noun="a finite number")
Name = Annotated[str, _TEXT]
Count = Annotated[int, _COUNT]
Finite = Annotated[float, _NUMBER]
StrategySettings = Annotated[Mapping[str, Any], SettingsField(), Key("settings")]


@dataclass(frozen=True, kw_only=True)
class Ranked(Settings):
    """`[[ranking]]`: a candidate, and what virtual time said of it; the first one was chosen."""

    strategy: Name
    strategy_settings: StrategySettings
    seconds_to_target: Annotated[float | None, _NUMBER] = None  # None: it did not get there
    bytes_sent: Annotated[float | None, _NUMBER] = None  # until then, or until its end
    value: Annotated[float | None, _NUMBER] = None  # as last evaluated
    fate: Name = ""  # what became of it, if it did not get there
    risk: Name = ""


@dataclass(frozen=True, kw_only=True)
class Plan(Settings):
    """What to train and how. What is left out is the task's own choice, or nothing."""

    task: Name
    model: Name
    batch_size: Count
    lr: Finite
    strategy: Name
    strategy_settings: StrategySettings
    workers: Count
    steps: Count
    target: Finite
    seed: Annotated[int, Whole(at_least=-MOST, at_most=MOST)] = 0
    evaluate_every: Annotated[int | None, _COUNT] = None
    bandwidth: Annotated[str | None, _TEXT] = None  # what was emulated, and will be again
    pace: Annotated[str | None, _TEXT] = None
    slow: Annotated[tuple[str, ...], ListOf(item=_TEXT, noun="a list of texts such as 2=4.0, not empty")] = ()
    device: Name = "cpu"
    cluster: Annotated[str | None, _TEXT] = None  # its name or file, where it was not measured
    made_by: Name = ""
    ranking: Annotated[tuple[Ranked, ...], ListOf(item=Table(of=Ranked), noun="one or more [[ranking]]")] = ()
    measured: Annotated[Cluster | None, Table(of=Cluster, noun="a table [measured]")] = None

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
        return build(lookup("strategy", self.strategy, STRATEGIES), self.strategy_settings)

    def pairs(self) -> list[str]:
        """The settings as `--set` takes them."""
        return [f"{key}={value}" for key, value in self.strategy_settings.items()]

    def notes(self, workers: int) -> list[str]:
        """What a reader must know before comparing what comes of it with what was predicted."""
        return [] if workers == self.workers else [f"planned for {self.workers} workers, not for {workers}"]

    def options(self) -> dict[str, Any]:
        """By their names in the commands: what those take from here, unless it is given to them."""
        own = {"strategy_settings", "made_by", "ranking", "measured"}
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
