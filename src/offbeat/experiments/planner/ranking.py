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
from offbeat.experiments.planner.trials import Trial
from offbeat.experiments.report.aggregate import Statistic

CLOSE = 0.1  # fraction of the seconds to the target by which predictions err: a smaller difference is a tie
BEHIND = 0.01  # fraction of BSP's value at the same step; a smaller gap is not mentioned
SPREAD = 0.1  # fraction of the mean seconds to the target; a smaller spread is not mentioned


@dataclass(frozen=True)
class Outcome:
    """A candidate's trials, one per seed; fewer if the candidate was given up after a failure."""

    strategy: Strategy[Any]
    trials: tuple[Trial, ...]
    seeds: int

    @property
    def label(self) -> str:
        """The strategy's name and its settings that differ from the defaults."""
        return label_of(self.strategy)

    @property
    def seconds(self) -> Statistic:
        """Seconds to the target, over the trials that reached it."""
        return Statistic.of(t.reached.seconds if t.reached else None for t in self.trials)

    @property
    def nbytes(self) -> Statistic:
        """Bytes sent until the target, or else until the end of the trial."""
        ends = [t.reached or (t.history[-1] if t.history else None) for t in self.trials]
        return Statistic.of(end.bytes_sent if end else None for end in ends)

    @property
    def value(self) -> Statistic:
        """The metric as last evaluated."""
        return Statistic.of(trial.value for trial in self.trials)

    @property
    def succeeds(self) -> bool:
        """True if the candidate reached the target with every seed."""
        return self.seconds.runs == self.seeds

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


def ranked(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Sort outcomes: the target reached with every seed, by seconds; then with some seeds; then by value.

    Equal outcomes keep their order, in which BSP is first. If the winner's results depend on the order
    of arrivals at a server, a candidate that is nearly as fast and repeats exactly is put before it.
    """

    def rank(outcome: Outcome) -> tuple[float, ...]:
        sign = 1 if outcome.trials[0].job.task.higher_is_better else -1
        mean_s, value = outcome.seconds.mean, outcome.value.mean
        return (
            outcome.seeds - outcome.seconds.runs if mean_s is not None else math.inf,  # seeds that failed
            mean_s if mean_s is not None and outcome.succeeds else math.inf,
            any(trial.problem != "" for trial in outcome.trials),
            value is None,
            0.0 if value is None else -sign * value,
        )

    ranking = sorted(outcomes, key=rank)
    fastest_s = ranking[0].seconds.mean if ranking else None
    if fastest_s is not None:
        close = [o for o in ranking if o.succeeds and (o.seconds.mean or 0.0) <= (1 + CLOSE) * fastest_s]
        repeatable = next((o for o in close if o.repeats), ranking[0])
        ranking.sort(key=lambda outcome: outcome is not repeatable)
    return ranking


def risks(outcome: Outcome, baseline: Outcome) -> list[str]:
    """List the problems of the trials that a real run may have too, in a few words each."""
    found = [trial.problem.split(":")[0] for trial in outcome.trials if trial.problem][:1]
    if 0 < outcome.seconds.runs < len(outcome.trials):
        found.append(f"reached by {outcome.seconds.runs} of {len(outcome.trials)} seeds")
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
    """Return whether the value missed the target again after reaching it."""
    if trial.reached is None or trial.job.target is None:
        return False
    sign = 1 if trial.job.task.higher_is_better else -1
    later = trial.history[trial.history.index(trial.reached) + 1 :]
    return any(not sign * point.value >= sign * trial.job.target for point in later)


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
