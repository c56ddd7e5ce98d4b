"""Plan of a round: how many local steps each worker gets, so that all arrive at about the same time.

    T = max(τ t, busy/(1 − busy) c);   H_i = clamp(⌊(T(1 + slack) − c_i + c̃)/t_i⌋, 1, limit · T/t)

t_i are the seconds per local step, c_i those per exchange, t and c a high quantile of each, c̃ the median of
c_i [ours]: with the least of them, a worker that pushed alone, and so faster, would cost all others a step. A
worker that has not been timed yet is not planned. The slack [ours] is for steps that almost fit: all wait a
little longer, and a fast worker does one more. `busy` [ours] is the fraction of a round that is to be
computing: where τ steps are too short for that, because exchanges are slow, there are more steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median_low
from typing import NamedTuple

SLACK = 0.05  # of a round: a worker may be late by this fraction, to do one step more


class WorkerPace(NamedTuple):
    """Seconds per local step and per exchange of a worker."""

    step_s: float
    exchange_s: float


@dataclass(frozen=True)
class RoundPlan:
    """Length of a round, and the local steps of each worker in it."""

    length_s: float = 0.0  # of computing and exchanging, for all timed workers; 0: none is timed
    steps: Mapping[int, int] = field(default_factory=dict)  # by worker

    @cached_property
    def fewest(self) -> int:
        """The least local steps of a worker; 1 if none is planned."""
        return min(self.steps.values(), default=1)


def plan_round(
    paces: Mapping[int, WorkerPace],
    workers: Iterable[int],
    tau: int,
    quantile: float,
    limit: float,
    busy: float = 0.0,
) -> RoundPlan:
    """Plan the next round from the paces of its workers."""
    timed = {worker: paces[worker] for worker in workers if worker in paces}
    if not timed:
        return RoundPlan()
    step_s = _quantile([pace.step_s for pace in timed.values()], quantile)
    exchange_s = _quantile([pace.exchange_s for pace in timed.values()], quantile)
    steps = max(tau, busy / (1 - busy) * exchange_s / step_s)  # of the worker that sets the pace
    compute_s = steps * step_s
    typical_s = median_low(pace.exchange_s for pace in timed.values())
    max_steps = max(1, math.floor(limit * steps))

    def steps_of(pace: WorkerPace) -> int:
        available_s = (1 + SLACK) * compute_s - pace.exchange_s + typical_s
        return min(max(math.floor(available_s / pace.step_s), 1), max_steps)

    return RoundPlan(compute_s + typical_s, {worker: steps_of(pace) for worker, pace in timed.items()})


def _quantile(values: list[float], quantile: float) -> float:
    """Return the least value that at least this fraction of all values do not exceed."""
    return sorted(values)[max(0, math.ceil(quantile * len(values) - 1e-9) - 1)]
