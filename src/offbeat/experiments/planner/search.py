"""The search: every candidate runs on the cluster in virtual time, BSP first and in full, as the baseline."""

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
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback
from offbeat.experiments.planner.ranking import Outcome
from offbeat.experiments.planner.trials import Trial, attempt
from offbeat.experiments.tasks import Data, Task
from offbeat.worlds.virtual.cluster import Cluster

MARGIN = 1.25  # a candidate that needs more than this many times the best seconds so far is stopped
HALF_A_PERCENT = 0.005

TrialCallbacks = Callable[[Job, list[Ledger]], Sequence[Callback]]


def search(
    job: Job,
    strategies: Sequence[Strategy[Any]],
    seeds: Sequence[int],
    cluster: Cluster,
    data: Data,
    make_callbacks: TrialCallbacks = lambda job, ledgers: (),
    device: torch.device | str = "cpu",
) -> Iterator[Outcome]:
    """Yield the outcome of each strategy as it becomes known; the first strategy must be BSP.

    `job` gives everything but strategy and seed. If it has no target, one is derived from BSP's result.
    """
    best_s = math.inf
    for strategy in strategies:
        first = strategy is strategies[0]
        trials: list[Trial] = []
        for seed in seeds:
            trial_job = replace(job, strategy=strategy, seed=seed)
            limit_s = MARGIN * best_s
            trials.append(
                attempt(trial_job, cluster, data, limit_s, first, partial(make_callbacks, trial_job), device)
            )
            if not first and trials[-1].reached is None:
                break  # a candidate that fails once is not chosen
        if first and job.target is None:
            target = target_of(job.task, trials)
            job = replace(job, target=target)
            trials = [trial.with_target(target) for trial in trials]
        outcome = Outcome(strategy, tuple(trials), len(seeds))
        if outcome.succeeds and outcome.seconds.mean is not None:
            best_s = min(best_s, outcome.seconds.mean)
        yield outcome


def target_of(task: Task, trials: Sequence[Trial]) -> float:
    """Derive a target: the mean of the trials' last values, worse by half a percent."""
    values = [trial.value for trial in trials]
    known = [value for value in values if value is not None]
    if len(known) < len(values) or any(trial.problem for trial in trials):
        reason = next((trial.problem for trial in trials if trial.problem), "it diverges")
        raise SettingError(f"bsp reached no value to derive a target from, so give a target: {reason}")
    mean = sum(known) / len(known)
    return mean - (1 if task.higher_is_better else -1) * HALF_A_PERCENT * abs(mean)
