"""Planning: how many local steps each worker gets, so that all arrive at about the same time.

    T = max(τ t, busy/(1 − busy) c);   H_i = clamp(⌊(T(1 + slack) − c_i + c_min)/t_i⌋, 1, limit · T/t)

t_i are the seconds of a local step, c_i those of an exchange, t and c a high quantile of each. Who has not
been timed yet gets one step. The slack [ours] is for steps that almost fit: all wait a little longer, and a
fast worker does one more. `busy` [ours] is the part of a round that is to be computing: where an exchange
takes longer than τ steps leave room for, there are more steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

SLACK = 0.05  # of a round: by so much a worker may come late, and do a step more


class WorkerPace(NamedTuple):
    """How fast a worker is."""

    step_s: float
    exchange_s: float


@dataclass(frozen=True)
class RoundPlan:
    """One round's."""

    length_s: float = 0.0  # of computing and exchanging, for all who were timed; 0: nobody was
    steps: Mapping[int, int] = field(default_factory=dict)  # by worker


def plan(
    paces: Mapping[int, WorkerPace],
    workers: Iterable[int],
    tau: int,
    quantile: float,
    limit: float,
    busy: float = 0.0,
) -> RoundPlan:
    timed = {worker: paces[worker] for worker in workers if worker in paces}
    if not timed:
        return RoundPlan()
    step_s = _quantile([pace.step_s for pace in timed.values()], quantile)
    exchange_s = _quantile([pace.exchange_s for pace in timed.values()], quantile)
    steps = max(tau, busy / (1 - busy) * exchange_s / step_s)  # of whoever sets the pace
    compute_s = steps * step_s
    least_s = min(pace.exchange_s for pace in timed.values())
    most = max(1, math.floor(limit * steps))

    def fitting(pace: WorkerPace) -> int:
        left_s = (1 + SLACK) * compute_s - pace.exchange_s + least_s
        return min(max(math.floor(left_s / pace.step_s), 1), most)

    return RoundPlan(compute_s + least_s, {worker: fitting(pace) for worker, pace in timed.items()})


def _quantile(values: list[float], quantile: float) -> float:
    """The least value that at least this part of all do not exceed."""
    return sorted(values)[max(0, math.ceil(quantile * len(values) - 1e-9) - 1)]
