"""Groups: runs that differ in nothing but their seed, and their mean and spread.

The spread is the sample standard deviation (over n − 1); a single run has none. A mean over seconds or bytes
to the target is over the runs that reached it, and says how many those were.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from statistics import fmean, stdev
from typing import Any

from offbeat.core.settings import non_defaults, without_refused
from offbeat.core.strategy import Strategy
from offbeat.experiments.summary import Summary
from offbeat.strategies import STRATEGIES

SHARED = ("task", "model", "world", "cluster", "workers", "order", "skew", "inject", "emulated", "target")
"""What is the same in a group's runs beside strategy and settings."""


@dataclass(frozen=True)
class Statistic:
    """A number over several runs: the mean, the spread around it, and in how many runs there was one."""

    mean: float | None
    spread: float | None
    runs: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Statistic:
        known = [value for value in values if value is not None]
        spread = stdev(known) if len(known) > 1 else None
        return cls(fmean(known) if known else None, spread, len(known))


@dataclass
class Group:
    """The runs of one strategy with one choice of everything but the seed."""

    label: str
    runs: list[Summary] = field(default_factory=list)
    told: list[str] = field(default_factory=list)  # settings that the label tells

    def changed(self) -> list[str]:
        """The settings that are not the defaults."""
        return changed(self.runs[0]["strategy"], self.runs[0]["settings"])

    def figure(self, name: str) -> Statistic:
        return Statistic.of(run.get(name) for run in self.runs)

    @property
    def waiting(self) -> Statistic:
        """The share of the workers' time in which they were blocked."""
        return Statistic.of(_waiting(run) for run in self.runs)

    @property
    def synced(self) -> Statistic:
        """The share of steps that synchronized."""
        return Statistic.of(run["sync_steps"] / run["steps"] if run["steps"] else None for run in self.runs)

    def curve(self) -> list[dict[str, Any]]:
        """Means over the runs at the evaluations that all have, with the least and the greatest value."""
        histories = [
            {point["step"]: point for point in run["history"]} for run in self.runs if run["history"]
        ]
        shared = sorted(set.intersection(*map(set, histories))) if histories else []
        return [_mean_point([history[step] for history in histories]) for step in shared]

    def workers(self) -> list[dict[str, float]]:
        """Per rank, means over the runs: where the time went."""
        ranks = zip(*(run["per_worker"] for run in self.runs if run["per_worker"]), strict=False)
        return [
            {
                name: fmean(worker[name] for worker in same)
                for name in ("compute_s", "communicate_s", "wait_s")
            }
            | {"rank": same[0]["rank"], "staleness_max": max(worker["staleness_max"] for worker in same)}
            for same in ranks
        ]

    def staleness(self) -> dict[int, int]:
        """How many reads, of all workers and runs, were how far behind."""
        reads: dict[int, int] = {}
        for run in self.runs:
            for worker in run["per_worker"]:
                for behind, times in worker.get("staleness", {}).items():
                    reads[int(behind)] = reads.get(int(behind), 0) + times
        return dict(sorted(reads.items()))


def grouped(runs: list[Summary]) -> list[Group]:
    """The groups in the order in which each one's first run comes, named by what tells them apart."""
    groups: dict[str, Group] = {}
    for run in runs:
        known = STRATEGIES.get(run["strategy"], Strategy)
        settings = without_refused(known, run["settings"])
        key = json.dumps([run["strategy"], settings, *(run.get(name) for name in SHARED)])
        groups.setdefault(key, Group(run["strategy"])).runs.append(run)
    firsts = [group.runs[0] for group in groups.values()]
    for group in groups.values():
        first = group.runs[0]
        group.told = _settings_apart(first, firsts)
        group.label = " ".join([first["strategy"], *group.told, *_surroundings_apart(first, firsts)])
    return list(groups.values())


def changed(strategy: str, settings: dict[str, Any]) -> list[str]:
    """The settings that are not the defaults, as key=value; all, if no such strategy is known here."""
    known = STRATEGIES.get(strategy)
    differing = non_defaults(known, settings) if known else settings
    return [_written(key, value) for key, value in differing.items()]


def remarks(groups: list[Group]) -> list[str]:
    """What a reader must know before comparing these numbers."""
    return [
        f"{group.label}: nothing left the machine, because the server was beside all workers; its bytes and "
        "seconds are not those of a network"
        for group in groups
        if any(run["workers"] > 1 and run["steps"] and not run["bytes_sent"] for run in group.runs)
    ]


def figures(group: Group) -> dict[str, Any]:
    """The numbers of a group as a table or a page shows them."""
    names = ("seconds", "seconds_to_target", "bytes_to_target", "value", "best", "bytes_sent")
    known = {name: asdict(group.figure(name)) for name in (*names, "samples_per_second")}
    return known | {"waiting": asdict(group.waiting), "synced": asdict(group.synced)}


def _settings_apart(run: Summary, others: list[Summary]) -> list[str]:
    """The settings that another group of the same strategy has otherwise."""
    rivals = [other for other in others if other["strategy"] == run["strategy"]]
    return [
        _written(key, value)
        for key, value in run["settings"].items()
        if any(rival["settings"].get(key) != value for rival in rivals)
    ]


def _surroundings_apart(run: Summary, others: list[Summary]) -> list[str]:
    return [
        _written(name, run.get(name))
        for name in SHARED
        if any(other.get(name) != run.get(name) for other in others) and run.get(name) not in (None, [])
    ]


def _written(key: str, value: Any) -> str:
    """As it is written on a command line."""
    if isinstance(value, list):
        return f"{key}={'; '.join(map(str, value))}"
    return f"{key}={str(value).lower() if value is None or isinstance(value, bool) else value}"


def _mean_point(points: list[dict[str, Any]]) -> dict[str, Any]:
    mean: dict[str, Any] = {"step": points[0]["step"]}
    for name in ("seconds", "bytes_sent", "loss", "value"):
        known = [point[name] for point in points if point.get(name) is not None]
        mean[name] = fmean(known) if len(known) == len(points) else None  # it diverged in some, or is unknown
        if name in ("loss", "value"):
            mean[f"{name}_low"], mean[f"{name}_high"] = (min(known), max(known)) if known else (None, None)
    return mean


def _waiting(run: Summary) -> float | None:
    total = sum(worker["compute_s"] + worker["wait_s"] for worker in run["per_worker"])
    return sum(worker["wait_s"] for worker in run["per_worker"]) / total if total else None
