"""The cases of the benchmark plan, declared before they are run, and estimates of their seconds.

Three tasks at three rates, with equal workers and with one 4x slower: 18 cases. The planner was tuned with
none of them, nor with this seed; only `digits` was seen before, with another target and on another cluster.
Tasks with the same model share a calibration: computation is paced, and their samples have the same shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from offbeat.core.units import parse_rate
from offbeat.experiments.planner.candidates import CANDIDATES

HOSTS = 4
PACE_S = 0.04
RATES = ("1gbit", "200mbit", "50mbit")
STRAGGLERS: dict[str, tuple[str, ...]] = {"equal": (), "one 4x slower": ("--slow", "3=4.0")}
STEPS = 48
MOST_SEEDS = 1  # of each candidate in a ranking
WARM_UP = 2  # steps, as in the benchmark `prediction`: the first one imports parts of torch

# Estimates for two cores: what comes before and after the steps of a real run, and a calibration.
START_S, CALIBRATION_S = 9.0, 14.0
USUAL_STEPS = 36  # of a real run, which ends soon after the planned ones


@dataclass(frozen=True)
class Subject:
    """A task, its model and its bytes, and a target that BSP reaches in some 35 steps."""

    name: str
    model: str
    target: float
    nbytes: int
    trial_s: float  # CPU seconds, most of them for evaluations


TASKS = (
    Subject("digits", "cnn", 0.75, 172_200, 0.8),
    Subject("fashion-mnist", "mlp", 0.7, 2_678_824, 3.0),
    Subject("mnist", "mlp", 0.75, 2_678_824, 3.0),
)


@dataclass(frozen=True)
class Case:
    """A task, the rate of the links, and whether a worker is slow."""

    subject: Subject
    rate: str
    workers: str

    @property
    def name(self) -> str:
        return f"{self.subject.name}, {self.rate}, {self.workers}"

    @property
    def hosts(self) -> str:
        """What a calibration depends on; cases that have it in common share one."""
        return f"{self.subject.model}, {self.rate}, {self.workers}"

    @property
    def ranking_s(self) -> float:
        """Estimate the CPU seconds of the ranking."""
        return 5.0 + len(CANDIDATES) * self.subject.trial_s

    def measuring_s(self, most: int) -> float:
        """Estimate the seconds of the real runs: BSP, and `most` others that exchange a tenth as much."""
        exchange_s = 2 * (HOSTS - 1) / HOSTS * self.subject.nbytes * 8 / parse_rate(self.rate)
        step_s = PACE_S * (4 if STRAGGLERS[self.workers] else 1)
        return (1 + most) * (START_S + USUAL_STEPS * step_s) + USUAL_STEPS * exchange_s * (1 + most / 10)


CASES = tuple(itertools.starmap(Case, itertools.product(TASKS, RATES, STRAGGLERS)))


def select(tasks: Iterable[str], rates: Iterable[str], workers: Iterable[str]) -> list[Case]:
    """Select the cases of these tasks, rates and kinds of workers, in the order declared."""
    return [c for c in CASES if c.subject.name in tasks and c.rate in rates and c.workers in workers]


def describe(cases: Iterable[Case], most: int, cores: int) -> list[str]:
    """Describe cases with their estimates, and the minutes of all."""
    cases = list(cases)
    lines = [
        f"{case.name}: {case.ranking_s:.0f} CPU s to rank, {case.measuring_s(most):.0f} s to measure"
        for case in cases
    ]
    calibrating = CALIBRATION_S * len({case.hosts for case in cases}) / 60
    ranking = sum(case.ranking_s for case in cases) / 60 / cores
    measuring = sum(case.measuring_s(most) for case in cases) / 60
    total = f"{calibrating + ranking + measuring:.0f} min"
    lines.append(f"calibrating {calibrating:.0f}, ranking {ranking:.0f}, measuring {measuring:.0f}: {total}")
    return lines
