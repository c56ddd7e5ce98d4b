"""The search: every candidate runs on the cluster in virtual time, BSP first and in full, as the baseline.

1. BSP runs with each of the first seeds, for all its steps: the baseline, and a target if none is given.
2. Every other candidate runs with the first seed, until it has taken `MARGIN` times the seconds of the best
   one so far.
3. Those that reached the target run with the other first seeds. From here on none is stopped for its time.
4. Those that are not apart from the leader run with further seeds, one by one: see race.py.
"""

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
from offbeat.experiments.loop import Callback, Evaluation
from offbeat.experiments.planner.race import ONE_SEED
from offbeat.experiments.planner.ranking import Outcome, comparison, leader_of
from offbeat.experiments.planner.trials import Trial, attempt, value_untrained
from offbeat.experiments.summary import first_at_target
from offbeat.experiments.tasks import Data, Task
from offbeat.worlds.virtual.cluster import Cluster
from offbeat.worlds.virtual.failures import AbsenceSource

MARGIN = ONE_SEED  # times the best seconds so far, after which a candidate's first trial is stopped
HALF_A_PERCENT = 0.005
LOOKS = 100  # evaluations of a whole run, if nobody says how many

TrialCallbacks = Callable[[Job, list[Ledger]], Sequence[Callback]]


def search(
    job: Job,
    strategies: Sequence[Strategy[Any]],
    seeds: Sequence[int],
    cluster: Cluster,
    data: Data,
    make_callbacks: TrialCallbacks = lambda job, ledgers: (),
    device: torch.device | str = "cpu",
    most_seeds: int = 1,
    failures: AbsenceSource | None = None,
) -> Iterator[Outcome]:
    """Yield the outcome of a strategy after each of its trials; the first strategy must be BSP.

    `job` gives everything but strategy and seed. If it has no target, one is derived from BSP's result.
    Candidates that are close run with more seeds, up to `most_seeds` in all. With `failures`, workers are
    away at times, at the same ones for all strategies.
    """
    order = [*seeds, *range(max(seeds) + 1, max(seeds) + 1 + most_seeds)][: max(len(seeds), most_seeds)]
    outcomes = [Outcome(strategy, ()) for strategy in strategies]

    def run(number: int, limit_s: float = math.inf, whole: bool = False) -> Outcome:
        """Run a candidate with its next seed."""
        before = outcomes[number]
        own = replace(job, strategy=before.strategy, seed=order[len(before.trials)])
        trial = attempt(own, cluster, data, limit_s, whole, partial(make_callbacks, own), device, failures)
        outcomes[number] = replace(before, trials=(*before.trials, trial))
        return outcomes[number]

    check_target(job, order, data, device)
    for _ in seeds:
        run(0, whole=True)
    baseline = outcomes[0].trials
    if job.target is None:
        job = replace(job, target=target_of(job.task, baseline))
        baseline = tuple(trial.with_target(job.target or 0.0) for trial in baseline)
        outcomes[0] = replace(outcomes[0], trials=baseline)
        check_target(job, order, data, device)
    yield outcomes[0]

    def firsts() -> list[float]:
        return [outcome.race_seconds[0] for outcome in outcomes if outcome.race_seconds]

    for number in range(1, len(outcomes)):
        yield run(number, MARGIN * min(firsts(), default=math.inf))
    for _ in seeds[1:]:
        for number, outcome in enumerate(outcomes):
            if outcome.succeeds and len(outcome.trials) < len(seeds):
                yield run(number)
    while again := _to_run_again(outcomes, len(order)):
        for number in again:
            yield run(number)


def _to_run_again(outcomes: Sequence[Outcome], most: int) -> list[int]:
    """Return the candidates that need another seed, the leader first."""
    leader = leader_of(outcomes)
    if leader is None:
        return []
    against = {number: comparison(outcome, leader) for number, outcome in enumerate(outcomes)}
    close = [
        number
        for number, how in against.items()
        if how is not None and how.open and len(outcomes[number].trials) < most
    ]
    if not close or len(leader.trials) == most:
        return close
    first = next(number for number, outcome in enumerate(outcomes) if outcome is leader)
    return [first, *close]


def evaluation_steps(job: Job, samples: int) -> int:
    """Return the steps between evaluations of a trial: fine, because looking takes no virtual time."""
    steps = max(1, min(job.steps_per_epoch(samples), job.total_steps(samples) // LOOKS))
    return job.evaluate_every or steps


def check_target(job: Job, seeds: Sequence[int], data: Data, device: torch.device | str) -> None:
    """Refuse a target that needs no training with some seed."""
    for seed in seeds if job.target is not None else ():
        start = value_untrained(replace(job, seed=seed), data, device)
        if first_at_target(job, [Evaluation(0, 0.0, 0.0, start)]):
            raise SettingError(
                f"the untrained model is at {start:.4g} with seed {seed}, so every strategy reaches "
                f"{job.target:g} at once: give a target that takes training"
            )


def target_of(task: Task, trials: Sequence[Trial]) -> float:
    """Derive a target: the mean of the trials' last values, worse by half a percent."""
    values = [trial.value for trial in trials]
    known = [value for value in values if value is not None]
    if len(known) < len(values) or any(trial.problem for trial in trials):
        reason = next((trial.problem for trial in trials if trial.problem), "it diverges")
        raise SettingError(f"bsp reached no value to derive a target from, so give a target: {reason}")
    mean = sum(known) / len(known)
    return mean - (1 if task.higher_is_better else -1) * HALF_A_PERCENT * abs(mean)
