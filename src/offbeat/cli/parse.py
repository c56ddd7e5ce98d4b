"""Parsing of options: the objects that their texts describe, or an error that names the option."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from offbeat.cli.options import Course, Emulated, Failures, Length, Model, naming
from offbeat.core.settings import build, lookup, parse_pairs, split
from offbeat.core.strategy import Strategy
from offbeat.core.units import parse_rate, seconds_of
from offbeat.errors import SettingError
from offbeat.experiments.job import Job
from offbeat.experiments.planner.cost import Price
from offbeat.experiments.tasks import Task
from offbeat.experiments.tasks import task as make_task
from offbeat.strategies import STRATEGIES
from offbeat.worlds.processes.emulation import Emulation
from offbeat.worlds.virtual.failures import AbsenceSource, RandomFailures
from offbeat.worlds.virtual.spot_trace import load_spot_trace

LEAST_BITS_PER_S = 1e6  # a network that is slower is only meant if its unit is given


def job_of(task: Task, strategy: Strategy[Any], seed: int, length: Length, course: Course) -> Job:
    """Build a job from the options that describe it."""
    return Job(
        task=task,
        strategy=strategy,
        workers=length.workers,
        seed=seed,
        epochs=length.epochs,
        steps=length.steps,
        evaluate_every=course.evaluate_every,
        schedule=course.schedule,
        target=course.target,
        order=course.order,
        skew=course.skew,
        inject=fractions_of(course.inject),
        work=course.work,
    )


def task_of(name: str, model: Model) -> Task:
    """Build a task; options that were not given have the task's defaults."""
    if "." in name and ":" not in name:
        raise SettingError(f"{name!r} is no task: to name a function of yours, write package.module:function")
    settings = {"model": model.model, "batch_size": model.batch_size, "lr": model.lr}
    return make_task(name, **{key: value for key, value in settings.items() if value is not None})


def strategy_of(name: str, settings: Iterable[str]) -> Strategy[Any]:
    """Build a strategy from its name and settings such as `period=8`."""
    with naming("--set"):
        pairs = parse_pairs(settings)
    return build(lookup("strategy", name, STRATEGIES), pairs)


def strategies_of(text: str, settings: Iterable[str]) -> list[Strategy[Any]]:
    """Build the strategies of a text such as `bsp,local_sgd(period=4)`.

    `settings` such as `local_sgd.period=8` apply to all strategies of that name, unless the text itself sets
    them in parentheses.
    """
    variants = [_variant(part) for part in split(text)]
    names = [name for name, _ in variants]
    common: dict[str, list[str]] = {name: [] for name in names}
    for pair in settings:
        name, _, setting = pair.partition(".")
        if name not in common:
            known = list(dict.fromkeys(names))
            raise SettingError(f"--set {pair!r}: write it as name.key=value, with a name out of {known}")
        common[name].append(setting)
    strategies = [strategy_of(name, [*common[name], *own]) for name, own in variants]
    for number, strategy in enumerate(strategies):
        if strategy in strategies[:number]:
            raise SettingError(
                f"--strategies {text!r}: {names[number]} is listed twice with the same settings"
            )
    return strategies


def _variant(text: str) -> tuple[str, list[str]]:
    """Split `local_sgd(period=4)` into its name and its settings."""
    match = re.fullmatch(r"([^()]*)(?:\((.*)\))?", text)
    pairs = split(match[2]) if match and match[2] else []
    if not match or not all(re.fullmatch(r"[\w-]+ *=.+", pair) for pair in pairs):
        raise SettingError(f"--strategies {text!r}: write settings as key=value, such as local_sgd(period=4)")
    return match[1].strip(), pairs


def names_of(text: str | None) -> list[str] | None:
    """Split `local_sgd,ssp` into names, which must be different; None stays None."""
    if text is None:
        return None
    names = [name.strip() for name in text.split(",")]
    if len(set(names)) < len(names):
        raise SettingError(f"--strategies {text!r}: give each name once")
    return names


def emulation_of(options: Emulated, workers: int) -> Emulation:
    """Build the emulation that the options describe."""
    if options.bandwidth is not None:
        with naming("--bandwidth"):
            _check_unit(options.bandwidth)
            parse_rate(options.bandwidth)
    factors = dict(_slowdown(text, workers) for text in options.slow or [])
    with naming("--pace"):
        pace_s = seconds_of(options.pace) if options.pace else None
    return Emulation(bandwidth=options.bandwidth, pace_s=pace_s, slow=factors)


def _check_unit(rate: str) -> None:
    """Raise an error if a rate has no unit and is so low that megabits were meant."""
    number = rate.strip()
    if re.fullmatch(r"[0-9.]+", number) and parse_rate(number) < LEAST_BITS_PER_S:
        raise SettingError(
            f"{number} is {number} bits per second, for without a unit bits are meant. Did you mean "
            f"{number}mbit? Write {number}bit if not"
        )


def _slowdown(text: str, workers: int) -> tuple[int, float]:
    """Read `2=4.0` as rank and factor."""
    match = re.fullmatch(r"(\d+)=(\d+(?:\.\d+)?)", text)
    if not match or float(match[2]) < 1:
        raise SettingError(f"--slow {text!r}: write RANK=FACTOR with a factor of at least 1, such as 2=4.0")
    if int(match[1]) >= workers:
        raise SettingError(f"--slow {text!r}: there is no rank {match[1]} among {workers} workers")
    return int(match[1]), float(match[2])


def fractions_of(text: str | None) -> tuple[float, float] | None:
    """Read 0.5,0.5 as the two fractions of data injection; None stays None."""
    if text is None:
        return None
    try:
        alpha, beta = (float(part) for part in text.split(","))
    except ValueError as error:
        raise SettingError(f"--inject {text!r}: write two fractions, such as 0.5,0.5") from error
    return alpha, beta


def failures_of(options: Failures, trace: Path | None) -> AbsenceSource | None:
    """Build what takes workers away: random failures, a trace, or nothing."""
    if trace is not None:
        if options.mtbf or options.rejoin:
            raise SettingError("--mtbf and --rejoin say when workers are away, and so does a trace: give one")
        return load_spot_trace(trace)
    if options.mtbf is None and options.rejoin is None:
        return None
    if options.mtbf is None or options.rejoin is None:
        raise SettingError("--mtbf and --rejoin belong together: --mtbf 2h --rejoin 90s")
    with naming("--mtbf"):
        mtbf_s = seconds_of(options.mtbf)
    with naming("--rejoin"):
        return RandomFailures(mtbf_s, seconds_of(options.rejoin))


def until_of(text: str | None) -> float | None:
    """Read the virtual time at which a run ends."""
    with naming("--until"):
        return None if text is None else seconds_of(text)


def price_of(text: str | None) -> Price | None:
    """Read the price of a machine."""
    with naming("--price"):
        return None if text is None else Price.parse(text)


def seeds_of(text: str) -> list[int]:
    """Read 0,1,2 as seeds, which must be different."""
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise SettingError(f"--seeds {text!r}: write whole numbers, such as 0,1,2") from error
    if len(set(seeds)) < len(seeds):
        raise SettingError(f"--seeds {text!r}: give each seed once, or the same run would count twice")
    return seeds


def out_of(out: Path | None, *names: str) -> Path:
    """Return the folder that was given, or one named after the run and the time."""
    run = re.sub(r"[/\\:]+", "-", "-".join(names)).strip("-.")  # a task may be folder/file.py:build
    return out or Path("runs") / f"{run}-{datetime.now():%Y%m%d-%H%M%S}"
