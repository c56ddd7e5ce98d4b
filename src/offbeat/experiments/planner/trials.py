"""Trials: runs of candidates in virtual time, each stopped as soon as its result is known.

A trial stops when it has reached the target and a few more evaluations have shown whether it stays there, or
when it has taken longer than `limit_s` without reaching the target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from offbeat.core.ledger import Ledger, WorkerTotals
from offbeat.errors import OffbeatError
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback, Evaluation, Worker
from offbeat.experiments.summary import first_at_target
from offbeat.experiments.tasks import Data
from offbeat.experiments.virtual_run import simulate
from offbeat.worlds.virtual.cluster import Cluster

AFTERWARDS = 3  # evaluations after the one that reached the target


class StopTrial(Exception):
    """Raised to stop a trial whose result is known."""


@dataclass(frozen=True)
class Trial:
    """The result of one run, complete or stopped."""

    job: Job
    history: tuple[Evaluation, ...] = ()
    seconds: float = 0.0  # when the run ended or was stopped
    staleness: int = 0  # greatest staleness of any worker's weights, in steps
    stopped: bool = False  # whether it was stopped as too slow
    problem: str = ""  # the error that ended the run

    @property
    def reached(self) -> Evaluation | None:
        """The first evaluation at which the target was reached."""
        return first_at_target(self.job, list(self.history))

    @property
    def value(self) -> float | None:
        """The metric as last evaluated; None without an evaluation, or if it was NaN."""
        last = self.history[-1].value if self.history else math.nan
        return None if math.isnan(last) else last

    def with_target(self, target: float) -> Trial:
        """Return the same trial, judged by another target."""
        return replace(self, job=replace(self.job, target=target))


class EarlyStopping(Callback):
    """Callback that stops a trial as soon as its result is known."""

    def __init__(self, job: Job, limit_s: float, whole: bool) -> None:
        self._job, self._limit_s, self._whole = job, limit_s, whole
        self._history: list[Evaluation] = []
        self._worker_totals: list[WorkerTotals] = []
        self._seconds = 0.0
        self._stopped = False

    def stepped(self, step: int, loss: Tensor, worker: Worker) -> None:
        self._seconds = max(self._seconds, worker.seconds)
        if self._seconds > self._limit_s and first_at_target(self._job, self._history) is None:
            self._stopped = True
            raise StopTrial

    def evaluated(self, history: list[Evaluation], worker_totals: list[WorkerTotals]) -> None:
        self._history, self._worker_totals = history, worker_totals
        self._seconds = max(self._seconds, history[-1].seconds)
        reached = first_at_target(self._job, history)
        if reached is not None and not self._whole and len(history) > history.index(reached) + AFTERWARDS:
            raise StopTrial

    def trial(self, problem: str = "") -> Trial:
        """Return the trial as observed so far."""
        staleness = max((totals.staleness_max for totals in self._worker_totals), default=0)
        return Trial(self._job, tuple(self._history), self._seconds, staleness, self._stopped, problem)


def attempt(
    job: Job,
    cluster: Cluster,
    data: Data,
    limit_s: float = math.inf,
    whole: bool = False,
    make_callbacks: Callable[[list[Ledger]], Sequence[Callback]] = lambda ledgers: (),
    device: torch.device | str = "cpu",
) -> Trial:
    """Run a trial until its result is known, or with `whole` until all steps are done."""
    stopping = EarlyStopping(job, limit_s, whole)
    problem = ""
    try:
        simulate(job, cluster, data, lambda ledgers: [*make_callbacks(ledgers), stopping], device)
    except StopTrial:
        pass
    except OffbeatError as error:  # this candidate cannot run on this cluster; others may
        problem = str(error)
    return stopping.trial(problem)
