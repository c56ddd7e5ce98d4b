"""Groups of runs that differ in nothing but their seed, with means and spreads over each group.

The spread is the sample standard deviation (over n − 1); a single run has none. A mean of seconds or bytes to
the target is over the runs that reached it; their number is recorded, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from statistics import fmean, stdev
from typing import Any

from offbeat.core.settings import non_defaults, without_refused
from offbeat.core.strategy import Strategy
from offbeat.errors import SettingError
from offbeat.experiments.summary import Summary
from offbeat.strategies import STRATEGIES

SHARED = ("task", "model", "world", "cluster", "workers", "order", "skew", "inject", "emulated", "target")
"""The keys of a summary, besides strategy and settings, that are the same in all runs of a group."""


@dataclass(frozen=True)
class Statistic:
    """A number over several runs: its mean, its spread, and how many runs have it."""

    mean: float | None
    spread: float | None
    runs: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Statistic:
        """Compute the statistic of the values that are not None."""
        known = [value for value in values if value is not None]
        spread = stdev(known) if len(known) > 1 else None
        return cls(fmean(known) if known else None, spread, len(known))


@dataclass
class RunGroup:
    """The runs of one strategy that have everything but the seed in common."""

    label: str
    runs: list[Summary] = field(default_factory=list)
    label_settings: list[str] = field(default_factory=list)  # settings that are part of the label

    def changed(self) -> list[str]:
        """Return the settings that differ from the defaults, as key=value."""
        return changed(self.runs[0]["strategy"], self.runs[0]["settings"])

    def statistic(self, name: str) -> Statistic:
        """Compute the statistic of a number in the summaries."""
        return Statistic.of(number_of(run, name) for run in self.runs)

    @property
    def waiting(self) -> Statistic:
        """The fraction of the workers' time that they were blocked."""
        return Statistic.of(_waiting(run) for run in self.runs)

    @property
    def synced(self) -> Statistic:
        """The fraction of steps that synchronized."""
        return Statistic.of(run["sync_steps"] / run["steps"] if run["steps"] else None for run in self.runs)

    def curve(self) -> list[dict[str, Any]]:
        """Average the runs at the evaluations they have in common, with the least and the greatest value."""
        histories = [
            {point["step"]: point for point in run["history"]} for run in self.runs if run["history"]
        ]
        shared = sorted(set.intersection(*map(set, histories))) if histories else []
        return [_mean_point([history[step] for history in histories]) for step in shared]

    def workers(self) -> list[dict[str, float]]:
        """Average over the runs, for each rank, the seconds spent computing, communicating and waiting."""
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
        """Count the reads from the server of all workers and runs, by their staleness."""
        reads: dict[int, int] = {}
        for run in self.runs:
            for worker in run["per_worker"]:
                for steps, count in worker.get("staleness", {}).items():
                    reads[int(steps)] = reads.get(int(steps), 0) + count
        return dict(sorted(reads.items()))


def grouped(runs: list[Summary]) -> list[RunGroup]:
    """Group runs, in the order of each group's first run, and label the groups by their differences."""
    groups: dict[str, RunGroup] = {}
    for run in runs:
        settings = without_refused(_class_of(run["strategy"]) or Strategy, run["settings"])
        key = json.dumps([run["strategy"], settings, *(run.get(name) for name in SHARED)])
        groups.setdefault(key, RunGroup(run["strategy"])).runs.append(run)
    firsts = [group.runs[0] for group in groups.values()]
    for group in groups.values():
        first = group.runs[0]
        group.label_settings = _distinct_settings(first, firsts)
        group.label = " ".join(
            [first["strategy"], *group.label_settings, *_distinct_surroundings(first, firsts)]
        )
    return list(groups.values())


def changed(strategy: str, settings: dict[str, Any]) -> list[str]:
    """Return the settings that differ from the defaults, as key=value; all, if the strategy is unknown."""
    cls = _class_of(strategy)
    differing = non_defaults(cls, settings) if cls else settings
    return [_written(key, value) for key, value in differing.items()]


def _class_of(strategy: str) -> type[Strategy[Any]] | None:
    """Return the class of a strategy; None if it is unknown here, or a plugin that cannot be used."""
    try:
        return STRATEGIES.get(strategy)
    except SettingError:
        return None


def remarks(groups: list[RunGroup]) -> list[str]:
    """Return warnings for readers who compare the groups' numbers."""
    return [f"{group.label}: {text}" for group in groups for text in cautions(group.runs)] + [
        f"{group.label}: nothing was sent, because the run ended before the first exchange; do not compare "
        "its bytes and seconds"
        for group in groups
        if any(
            run["workers"] > 1 and run["steps"] and not number_of(run, "bytes_total") for run in group.runs
        )
    ]


def cautions(runs: list[Summary]) -> list[str]:
    """Return what the table of results does not show: work that did not count, a mean that nobody trained."""
    told = []
    if count := _of_workers(runs, "refused"):
        updates = "update was" if count == 1 else "updates were"
        told.append(f"{count} {updates} not used: too late for the server, or not finite")
    if count := _of_workers(runs, "outliers"):
        one = "change was left out of a merge: an outlier"
        told.append(f"{count} {one if count == 1 else 'changes were left out of merges: outliers'}")
    apart = [run for run in runs if run.get("replica_value") is not None and run["value"] is not None]
    if apart:
        mean, own = (fmean(run[name] for run in apart) for name in ("value", "replica_value"))
        told.append(
            f"no worker trained the mean that is evaluated ({apart[0]['metric']} {mean:.4g}); "
            f"worker 0's own weights: {own:.4g}"
        )
    return told


def _of_workers(runs: list[Summary], name: str) -> int:
    return sum(worker.get(name, 0) for run in runs for worker in run["per_worker"])


def number_of(entry: dict[str, Any], name: str) -> Any:
    """Return a number of a summary, or of an entry of its history; None if it has none.

    `bytes_total` is what workers and server sent; summaries of older versions have only its parts.
    """
    if name == "bytes_total" and name not in entry and "bytes_sent" in entry:
        return entry["bytes_sent"] + entry.get("bytes_server", 0)
    return entry.get(name)


def statistics(group: RunGroup) -> dict[str, Any]:
    """Collect the statistics of a group that the page shows."""
    names = ("seconds", "seconds_to_target", "bytes_to_target", "value", "best", "bytes_total")
    known = {name: asdict(group.statistic(name)) for name in (*names, "samples_per_second")}
    return known | {"waiting": asdict(group.waiting), "synced": asdict(group.synced)}


def _distinct_settings(run: Summary, others: list[Summary]) -> list[str]:
    """Return the settings in which another group of the same strategy differs."""
    rivals = [other for other in others if other["strategy"] == run["strategy"]]
    return [
        _written(key, value)
        for key, value in run["settings"].items()
        if any(rival["settings"].get(key) != value for rival in rivals)
    ]


def _distinct_surroundings(run: Summary, others: list[Summary]) -> list[str]:
    """Return the shared keys, such as workers or cluster, in which another group differs."""
    return [
        _written(name, run.get(name))
        for name in SHARED
        if any(other.get(name) != run.get(name) for other in others) and run.get(name) not in (None, [])
    ]


def _written(key: str, value: Any) -> str:
    """Write a setting as on a command line."""
    if isinstance(value, list):
        return f"{key}={'; '.join(map(str, value))}"
    return f"{key}={str(value).lower() if value is None or isinstance(value, bool) else value}"


def _mean_point(points: list[dict[str, Any]]) -> dict[str, Any]:
    mean: dict[str, Any] = {"step": points[0]["step"]}
    for name in ("seconds", "bytes_total", "loss", "value"):
        known = [number for point in points if (number := number_of(point, name)) is not None]
        mean[name] = fmean(known) if len(known) == len(points) else None  # diverged in some runs, or unknown
        if name in ("loss", "value"):
            mean[f"{name}_low"], mean[f"{name}_high"] = (min(known), max(known)) if known else (None, None)
    return mean


def _waiting(run: Summary) -> float | None:
    total = sum(worker["compute_s"] + worker["wait_s"] for worker in run["per_worker"])
    return sum(worker["wait_s"] for worker in run["per_worker"]) / total if total else None
