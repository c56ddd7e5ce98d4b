"""Ranking of the candidates by their seconds to the target, with the risks of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from offbeat.core.settings import non_defaults
from offbeat.core.strategy import Strategy
from offbeat.experiments.loop import Evaluation
from offbeat.experiments.planner.race import Comparison, compare, find_leader
from offbeat.experiments.planner.trials import Crossing, Trial
from offbeat.experiments.report.aggregate import Statistic

CLOSE = 0.1  # fraction of the seconds to the target by which predictions err
BEHIND = 0.01  # fraction of BSP's value at the same step; a smaller gap is not mentioned
MOST_NAMED = 4  # candidates that are named as too close to call
SPREAD = 0.1  # fraction of the mean seconds to the target; a smaller spread is not mentioned


@dataclass(frozen=True)
class Outcome:
    """A candidate's trials, one per seed. A candidate that is out of the race has fewer than others."""

    strategy: Strategy[Any]
    trials: tuple[Trial, ...]

    @property
    def label(self) -> str:
        """The strategy's name and its settings that differ from the defaults."""
        return label_of(self.strategy)

    @property
    def crossings(self) -> list[Crossing]:
        """The points at which trials reached the target."""
        return [trial.reached for trial in self.trials if trial.reached is not None]

    @property
    def seconds(self) -> Statistic:
        """Seconds to the target, over the trials that reached it."""
        return Statistic.of(crossing.seconds for crossing in self.crossings)

    @property
    def steps(self) -> Statistic:
        """Steps to the target, over the trials that reached it."""
        return Statistic.of(crossing.step for crossing in self.crossings)

    @property
    def step_seconds(self) -> Statistic:
        """Seconds per step: to the target, or else over the whole trial."""
        ends = [t.reached or (t.history[-1] if t.history else None) for t in self.trials]
        return Statistic.of(end.seconds / end.step if end and end.step else None for end in ends)

    @property
    def nbytes(self) -> Statistic:
        """Bytes that workers and server sent until the target, or else until the end of the trial."""
        ends = [t.reached or (t.history[-1] if t.history else None) for t in self.trials]
        return Statistic.of(end.bytes_total if end else None for end in ends)

    @property
    def goodput(self) -> Statistic:
        """Samples per second that count in the model."""
        return Statistic.of(trial.goodput for trial in self.trials)

    @property
    def machine_seconds(self) -> Statistic:
        """Paid seconds of all machines, until the target or else the end of the trial."""
        return Statistic.of(trial.machine_seconds for trial in self.trials)

    @property
    def value(self) -> Statistic:
        """The metric as last evaluated."""
        return Statistic.of(trial.value for trial in self.trials)

    @property
    def succeeds(self) -> bool:
        """True if the candidate reached the target with every seed that it was tried with."""
        return bool(self.trials) and len(self.crossings) == len(self.trials)

    @property
    def race_seconds(self) -> list[float]:
        """The seconds that count in the race, by seed; none if it failed once."""
        return [crossing.seconds for crossing in self.crossings] if self.succeeds else []

    @property
    def repeats(self) -> bool:
        """True if real runs repeat the trial; with a server, results depend on the order of arrivals."""
        return self.strategy.server_half() is None

    @property
    def failure(self) -> str:
        """The reason why the candidate did not succeed; empty if it did."""
        if self.succeeds:
            return ""
        last = next(trial for trial in self.trials if trial.reached is None)
        if last.problem:
            return "failed"
        return f"stopped at {last.seconds:.3g} s" if last.stopped else f"never in {last.seconds:.3g} s"


def label_of(strategy: Strategy[Any]) -> str:
    """Write a strategy as its name and the settings that differ from the defaults."""
    changed = non_defaults(type(strategy), strategy.settings())
    return " ".join([strategy.name, *(f"{key}={value}" for key, value in changed.items())])


def leader_of(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Return the outcome that all others are compared to, the fastest; None if none succeeded."""
    index = find_leader([outcome.race_seconds for outcome in outcomes])
    return None if index is None else outcomes[index]


def comparison(outcome: Outcome, leader: Outcome | None) -> Comparison | None:
    """Compare an outcome to the leader; None if it did not succeed, or is the leader."""
    if leader is None or outcome is leader or not outcome.succeeds:
        return None
    return compare(outcome.race_seconds, leader.race_seconds)


def ranked(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Sort outcomes: those that always reached the target, by seconds; then sometimes; then by value.

    Equal outcomes keep their order, in which BSP is first. If the winner's results depend on the order
    of arrivals at a server, a candidate that is nearly as fast and repeats exactly is put before it.
    """
    leader = leader_of(outcomes)

    def ratio(outcome: Outcome) -> float:
        against = comparison(outcome, leader)
        return against.ratio if against else 1.0 if outcome is leader else math.inf

    def rank(outcome: Outcome) -> tuple[float, ...]:
        sign = 1 if outcome.trials[0].job.task.higher_is_better else -1
        failures, value = len(outcome.trials) - len(outcome.crossings), outcome.value.mean
        return (
            failures if outcome.crossings else math.inf,
            ratio(outcome),
            any(trial.problem != "" for trial in outcome.trials),
            value is None,
            0.0 if value is None else -sign * value,
        )

    ranking = sorted(outcomes, key=rank)
    close = [outcome for outcome in ranking if ratio(outcome) <= 1 + CLOSE]
    repeatable = next((outcome for outcome in close if outcome.repeats), ranking[0] if ranking else None)
    return sorted(ranking, key=lambda outcome: outcome is not repeatable)


def verdict(ranking: Sequence[Outcome]) -> str:
    """Say in words how sure the first place of a ranking is."""
    leader = leader_of(ranking)
    if leader is None:
        return ""
    others = [(outcome, comparison(outcome, leader)) for outcome in ranking]
    against = [(outcome, how) for outcome, how in others if how is not None]
    close = [f"{outcome.label} {how}" for outcome, how in against if not how.apart]
    if len(close) > MOST_NAMED:
        close[MOST_NAMED:] = [f"and {len(close) - MOST_NAMED} more"]
    seeds = f"{len(leader.trials)} seeds" if len(leader.trials) > 1 else "1 seed"
    if close:
        return f"too close to call over {seeds}: {leader.label} is first, but not surely; {', '.join(close)}"
    if not against:
        return f"{leader.label} alone reached the target with every seed"
    second, how = min(against, key=lambda pair: pair[1].ratio)
    return f"{leader.label} is the fastest over {seeds}: the next, {second.label}, takes {how} as long"


def risks(outcome: Outcome, baseline: Outcome) -> list[str]:
    """List the problems of the trials that a real run may have too, in a few words each."""
    found = [trial.problem.split(":")[0] for trial in outcome.trials if trial.problem][:1]
    reached = len(outcome.crossings)
    if 0 < reached < len(outcome.trials):
        found.append(f"reached by {reached} of {len(outcome.trials)} seeds")
    if any(regresses(trial) for trial in outcome.trials):
        found.append("slips back")
    gap = behind(outcome, baseline)
    if gap is not None:
        found.append(f"{gap:.2g} behind bsp")
    mean, spread = outcome.seconds.mean, outcome.seconds.spread
    if mean and spread is not None and spread > SPREAD * mean:
        found.append(f"seeds ±{spread / mean:.0%}")
    staleness = max((trial.staleness for trial in outcome.trials), default=0)
    if staleness:
        found.append(f"stale by {staleness}")
    if not outcome.repeats:
        found.append("no two runs alike")
    return found


def regresses(trial: Trial) -> bool:
    """Return whether the mean value after reaching the target misses it again."""
    if not trial.afterwards or trial.job.target is None:
        return False
    sign = 1 if trial.job.task.higher_is_better else -1
    return not sign * fmean(point.value for point in trial.afterwards) >= sign * trial.job.target


def behind(outcome: Outcome, baseline: Outcome) -> float | None:
    """Return how much worse the last values are than BSP's at the same steps; None if not by much."""
    pairs = []
    for trial, other in zip(outcome.trials, baseline.trials, strict=False):
        at: dict[int, Evaluation] = {point.step: point for point in other.history}
        if trial.value is not None and trial.history[-1].step in at:
            pairs.append((trial.value, at[trial.history[-1].step].value))
    if not pairs:
        return None
    own, of_bsp = (fmean(values) for values in zip(*pairs, strict=True))
    sign = 1 if outcome.trials[0].job.task.higher_is_better else -1
    gap = sign * (of_bsp - own)
    return gap if gap > BEHIND * abs(of_bsp) else None
