"""Trials: a candidate's run in virtual time, which ends as soon as it has shown what is asked of it.

That is when it has reached the target and a few evaluations more have shown whether it stays there, or when
it has taken longer than `limit_s` without reaching it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from offbeat.core.ledger import Ledger, WorkerTotals
from offbeat.errors import OffbeatError
from offbeat.experiments.loop import Callback, Evaluation, Job, Worker
from offbeat.experiments.summary import point_of_target
from offbeat.experiments.tasks import Data
from offbeat.experiments.virtual_run import simulate
from offbeat.worlds.virtual.cluster import Cluster

AFTERWARDS = 3  # evaluations after the target was reached


class StopTrial(Exception):
    """There is nothing more to be seen in this run."""


@dataclass(frozen=True)
class Trial:
    """One run, as far as it went."""

    job: Job
    history: tuple[Evaluation, ...] = ()
    seconds: float = 0.0  # when it ended, or was stopped
    staleness: int = 0  # the most steps by which a worker's weights were behind
    stopped: bool = False  # before its end, as it had become too slow
    problem: str = ""  # why it could not run to its end

    @property
    def reached(self) -> Evaluation | None:
        """The first evaluation at which the target was reached."""
        return point_of_target(self.job, list(self.history))

    @property
    def value(self) -> float | None:
        """As last evaluated; None where there was no evaluation, or no number came of it."""
        known = self.history[-1].value if self.history else math.nan
        return None if math.isnan(known) else known

    def with_target(self, target: float) -> Trial:
        return replace(self, job=replace(self.job, target=target))


class EarlyStopping(Callback):
    """Sees whether a run has shown enough."""

    def __init__(self, job: Job, limit_s: float, whole: bool) -> None:
        self._job, self._limit_s, self._whole = job, limit_s, whole
        self._history: list[Evaluation] = []
        self._entries: list[WorkerTotals] = []
        self._seconds = 0.0
        self._stopped = False

    def stepped(self, step: int, loss: Tensor, worker: Worker) -> None:
        self._seconds = max(self._seconds, worker.seconds)
        if self._seconds > self._limit_s and point_of_target(self._job, self._history) is None:
            self._stopped = True
            raise StopTrial

    def evaluated(self, history: list[Evaluation], entries: list[WorkerTotals]) -> None:
        self._history, self._entries = history, entries
        self._seconds = max(self._seconds, history[-1].seconds)
        reached = point_of_target(self._job, history)
        if reached is not None and not self._whole and len(history) > history.index(reached) + AFTERWARDS:
            raise StopTrial

    def trial(self, problem: str = "") -> Trial:
        staleness = max((entry.staleness_max for entry in self._entries), default=0)
        return Trial(self._job, tuple(self._history), self._seconds, staleness, self._stopped, problem)


def attempt(
    job: Job,
    cluster: Cluster,
    data: Data,
    limit_s: float = math.inf,
    whole: bool = False,
    watchers: Callable[[list[Ledger]], Sequence[Callback]] = lambda ledgers: (),
    device: torch.device | str = "cpu",
) -> Trial:
    """Run until enough is known, or if `whole` is asked for until all steps are done."""
    judge = EarlyStopping(job, limit_s, whole)
    problem = ""
    try:
        simulate(job, cluster, data, lambda ledgers: [*watchers(ledgers), judge], device)
    except StopTrial:
        pass
    except OffbeatError as error:  # it does not get along with this cluster; others may
        problem = str(error)
    return judge.trial(problem)
