"""What elastic workers must hold after each of them has descended its own bowl: who took part decides it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat import DiLoCo
from tests.support.elastic import LR, target_of

Rosters = Sequence[Sequence[str]]  # who took part in each step; a name ends with the worker's number


def number_of(name: str) -> int:
    """Return the number of a worker: a restarted one has another name, and the same number."""
    return int(name.partition("-")[0].removeprefix("rank"))


def mean_target(names: Sequence[str]) -> Tensor:
    return torch.stack([target_of(number_of(name)) for name in names]).mean(0)


def bsp(rosters: Rosters) -> Tensor:
    weights = torch.zeros(32, dtype=torch.float64)
    for names in rosters:
        weights = weights - LR * (weights - mean_target(names))
    return weights


def periodic(strategy: Any, rosters: Rosters) -> Tensor:
    """LocalSGD, or DiLoCo with one fragment and no delay. A newcomer has the weights of the first member."""
    own = {name: torch.zeros(32, dtype=torch.float64) for name in rosters[0]}
    w_global = velocity = torch.zeros(32, dtype=torch.float64)
    for step, names in enumerate(rosters, 1):
        own = {name: own.get(name, own[names[0]]) for name in names}
        own = {name: own[name] - LR * (own[name] - target_of(number_of(name))) for name in names}
        if step % strategy.period == 0:
            mean = torch.stack([own[name] for name in names]).mean(0)
            if isinstance(strategy, DiLoCo):
                outer = w_global - mean
                velocity = strategy.outer_momentum * velocity + outer
                w_global = w_global - strategy.outer_lr * (outer + strategy.outer_momentum * velocity)
                mean = w_global
            own = dict.fromkeys(names, mean)
    return next(iter(own.values()))
