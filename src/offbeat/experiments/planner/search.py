"""Search: every candidate on the cluster in virtual time; BSP first and in full, as the others' measure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from offbeat.core.ledger import Ledger
from offbeat.core.strategy import Strategy
from offbeat.errors import SettingError
from offbeat.experiments.loop import Callback, Job
from offbeat.experiments.planner.ranking import Outcome
from offbeat.experiments.planner.trials import Trial, attempt
from offbeat.experiments.tasks import Data, Task
from offbeat.worlds.virtual.cluster import Cluster

MARGIN = 1.25  # times the best seconds to the target that are known: who needs longer is stopped
HALF_A_PERCENT = 0.005

Watching = Callable[[Job, list[Ledger]], Sequence[Callback]]


def search(
    job: Job,
    strategies: Sequence[Strategy[Any]],
    seeds: Sequence[int],
    cluster: Cluster,
    data: Data,
    watching: Watching = lambda job, ledgers: (),
    device: torch.device | str = "cpu",
) -> Iterator[Outcome]:
    """The outcome of each strategy as it becomes known; the first one must be BSP.

    `job` says all but strategy and seed. If it has no target, BSP's own result becomes one.
    """
    best_s = math.inf
    for strategy in strategies:
        first = strategy is strategies[0]
        trials: list[Trial] = []
        for seed in seeds:
            one = replace(job, strategy=strategy, seed=seed)
            limit_s = MARGIN * best_s
            trials.append(attempt(one, cluster, data, limit_s, first, partial(watching, one), device))
            if not first and trials[-1].reached is None:
                break  # one that fails once is no choice
        if first and job.target is None:
            target = target_of(job.task, trials)
            job = replace(job, target=target)
            trials = [trial.with_target(target) for trial in trials]
        outcome = Outcome(strategy, tuple(trials), len(seeds))
        if outcome.succeeds and outcome.seconds.mean is not None:
            best_s = min(best_s, outcome.seconds.mean)
        yield outcome


def target_of(task: Task, trials: Sequence[Trial]) -> float:
    """The mean of what these ended at, less half a percent of it."""
    values = [trial.value for trial in trials]
    known = [value for value in values if value is not None]
    if len(known) < len(values) or any(trial.problem for trial in trials):
        why = next((trial.problem for trial in trials if trial.problem), "it diverges")
        raise SettingError(f"bsp comes to no result to derive a target from, so give a --target: {why}")
    mean = sum(known) / len(known)
    return mean - (1 if task.higher_is_better else -1) * HALF_A_PERCENT * abs(mean)
