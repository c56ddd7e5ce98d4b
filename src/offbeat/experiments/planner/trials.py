"""Trials: runs of candidates in virtual time, each stopped as soon as its result is known.

    T = t₀ + (t₁ − t₀) (v* − v₀)/(v₁ − v₀)        seconds to the target v*; steps and bytes likewise

t₁ is the first evaluation at the target and t₀ the one before it; before the first one comes the untrained
model, at 0 s. So evaluations need not be fine for candidates to be told apart.

The target counts from the first exchange on. Before it every worker has trained alone, and only the
evaluation, which takes no time, has averaged them.

A trial stops when it has reached the target and has been watched for a tenth of its steps more (three
evaluations at least). One that is too slow stops at an evaluation after `limit_s` that misses the target:
only then is it certain that the target lies beyond.

Where workers fail, they are elastic, or come and go at a server. Worker 0 is then spared if there is a
server: it evaluates, and a server without machines of its own is beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from offbeat.core.ledger import Ledger, WorkerTotals
from offbeat.errors import OffbeatError, SettingError
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback, Evaluation
from offbeat.experiments.planner.cost import away_seconds, useful_steps
from offbeat.experiments.summary import first_at_target
from offbeat.experiments.tasks import Data
from offbeat.experiments.virtual_run import simulate
from offbeat.worlds.virtual.cluster import Absence, Cluster
from offbeat.worlds.virtual.failures import AbsenceSource, churn_of
from offbeat.worlds.virtual.step_times import usual_seconds

MakeCallbacks = Callable[[list[Ledger]], Sequence[Callback]]
WATCHED = 3  # evaluations after the one that reached the target, at least
WATCHED_STEPS = 0.1  # and steps, as a fraction of those to the target


class StopTrial(Exception):
    """Raised to stop a trial whose result is known."""


@dataclass(frozen=True)
class Crossing:
    """The point of a run at which it reached the target, between two evaluations."""

    step: float
    seconds: float
    bytes_total: float  # of workers and server


@dataclass(frozen=True)
class Trial:
    """The result of one run, complete or stopped."""

    job: Job
    history: tuple[Evaluation, ...] = ()
    seconds: float = 0.0  # when the run ended or was stopped
    staleness: int = 0  # greatest staleness of any worker's weights, in steps
    stopped: bool = False  # whether it was stopped as too slow
    problem: str = ""  # the error that ended the run
    start: float = math.nan  # the metric of the untrained model
    exchanged_at: int | None = 0  # step of the first evaluation after an exchange; None: there was none
    useful: dict[int, int] = field(default_factory=dict)  # steps of all workers that count, by evaluation
    unpaid: tuple[Absence, ...] = ()  # absences in which a machine cost nothing
    servers: int = 0  # machines of servers

    @property
    def reached(self) -> Crossing | None:
        """The point at which the target was reached, interpolated; None if it was not."""
        target, index = self.job.target, self._first
        if target is None or index is None:
            return None
        after = self.history[index]
        before = self.history[index - 1] if index else Evaluation(0, 0.0, 0.0, self.start)
        if not math.isfinite(before.value):  # nothing to interpolate from
            part = 1.0
        elif first_at_target(self.job, [before]):  # before the first exchange, or even untrained
            part = 1.0 if index else 0.0
        else:
            part = (target - before.value) / (after.value - before.value)

        def between(old: float, new: float) -> float:
            return old + part * (new - old)

        return Crossing(
            between(before.step, after.step),
            between(before.seconds, after.seconds),
            between(before.bytes_total, after.bytes_total),
        )

    @property
    def _first(self) -> int | None:
        """The index of the first evaluation at the target, from the first exchange on."""
        first = first_exchanged_at_target(self.job, self.history, self.exchanged_at)
        return None if first is None else self.history.index(first)

    @property
    def afterwards(self) -> tuple[Evaluation, ...]:
        """The evaluations after the first at the target, for as long as a trial is watched at least."""
        if self._first is None:
            return ()
        end = self.history[self._first].step * (1 + WATCHED_STEPS)
        later = self.history[self._first + 1 :]
        return tuple(point for place, point in enumerate(later) if place < WATCHED or point.step <= end)

    @property
    def _judged(self) -> Evaluation | None:
        """The first evaluation at the target, or else the last."""
        index = -1 if self._first is None else self._first
        return self.history[index] if self.history else None

    @property
    def goodput(self) -> float | None:
        """Samples per second that count in the model, until the target; see cost.py."""
        end = self._judged
        if end is None or not end.seconds or end.step not in self.useful:
            return None
        return self.useful[end.step] * self.job.task.batch_size / end.seconds

    @property
    def machine_seconds(self) -> float | None:
        """Paid seconds of all machines, until the target or else the end; see cost.py."""
        end = self.reached or self._judged
        if end is None:
            return None
        machines = self.job.workers + self.servers
        return machines * end.seconds - away_seconds(self.unpaid, end.seconds)

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
        self._exchanged_at = 0 if job.workers == 1 else None  # one worker has nobody to exchange with
        self._useful: dict[int, int] = {}
        self._stopped = False

    def evaluated(self, history: list[Evaluation], worker_totals: list[WorkerTotals]) -> None:
        self._history, self._worker_totals = history, worker_totals
        self._useful[history[-1].step] = useful_steps(worker_totals)
        if self._exchanged_at is None and any(totals.sync_steps for totals in worker_totals):
            self._exchanged_at = history[-1].step
        first = first_exchanged_at_target(self._job, history, self._exchanged_at)
        if first is None and history[-1].seconds > self._limit_s:
            self._stopped = True
            raise StopTrial
        if first is not None and not self._whole and self._watched(first):
            raise StopTrial

    def _watched(self, first: Evaluation) -> bool:
        """Return whether enough was seen after the target was reached."""
        later = sum(point.step > first.step for point in self._history)
        return later >= WATCHED and self._history[-1].step >= first.step * (1 + WATCHED_STEPS)

    def trial(self, **more: Any) -> Trial:
        """Return the trial as observed so far; `more` are fields that it cannot observe."""
        return Trial(
            job=self._job,
            history=tuple(self._history),
            seconds=self._history[-1].seconds if self._history else 0.0,
            staleness=max((totals.staleness_max for totals in self._worker_totals), default=0),
            stopped=self._stopped,
            exchanged_at=self._exchanged_at,
            useful=self._useful,
            **more,
        )


def first_exchanged_at_target(
    job: Job, history: Sequence[Evaluation], exchanged_at: int | None
) -> Evaluation | None:
    """Return the first evaluation at the target after weights or gradients were exchanged."""
    if exchanged_at is None:
        return None
    return first_at_target(job, [point for point in history if point.step >= exchanged_at])


def attempt(
    job: Job,
    cluster: Cluster,
    data: Data,
    limit_s: float = math.inf,
    whole: bool = False,
    make_callbacks: MakeCallbacks = lambda ledgers: (),
    device: torch.device | str = "cpu",
    failures: AbsenceSource | None = None,
) -> Trial:
    """Run a trial until its result is known, or with `whole` until all steps are done."""
    served = job.strategy.server_half() is not None
    failures = failures or churn_of(cluster)
    minimum = None if failures is None or served else least_minimum(job)
    cluster = cluster.for_workers(job.workers)
    slowest_s = max(usual_seconds(group.step_s) for group in cluster.workers)
    until_s = 4 * slowest_s * job.total_steps(len(data))  # of failures; a run that lasts longer is run again
    while True:
        failing, problem = cluster, ""
        stopping = EarlyStopping(job, limit_s, whole)
        callbacks = partial(_with_stopping, make_callbacks, stopping)
        try:
            if failures is not None:
                failing = failures.applied(cluster, job.seed, until_s, spared=1 if served else 0)
            simulate(job, failing, data, callbacks, device, minimum)
        except StopTrial:
            pass
        except OffbeatError as error:  # this candidate cannot run on this cluster; others may
            problem = str(error)
        trial = stopping.trial(
            problem=problem,
            start=value_untrained(job, data, device),
            unpaid=failing.away if failures is not None and not failures.paid_away else (),
            servers=cluster.server.count if served and cluster.server is not None else 0,
        )
        if failures is None or trial.seconds <= until_s:
            return trial
        until_s *= 4


def _with_stopping(make: MakeCallbacks, stopping: EarlyStopping, ledgers: list[Ledger]) -> list[Callback]:
    return [*make(ledgers), stopping]


def least_minimum(job: Job) -> int:
    """Return the least number of workers that may be left; 1 if the strategy cannot lose any."""
    for minimum in range(1, job.workers + 1):
        try:
            job.check_elastic(minimum)
        except SettingError:
            continue
        return minimum
    return 1


def value_untrained(job: Job, data: Data, device: torch.device | str = "cpu") -> float:
    """Evaluate the model that a job starts with."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(job.seed)
        return job.task.evaluate(job.task.build().to(device), data)
