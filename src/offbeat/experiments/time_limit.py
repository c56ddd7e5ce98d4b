"""The end of a run in virtual time: when its time is up, or when nobody knows any more who is away.

A run whose time is up ends with the first step of worker 0, or of the first of a roster, that ends then or
later. Its result is the last evaluation before. [ours]
"""

from __future__ import annotations

from torch import Tensor

from offbeat.core.ledger import WorkerTotals
from offbeat.errors import SettingError
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback, Evaluation, Worker
from offbeat.worlds.virtual.cluster import Cluster
from offbeat.worlds.virtual.failures import churn_of
from offbeat.worlds.virtual.step_times import usual_seconds

LONGER = 20  # times the slowest workers' seconds: for so long absences are drawn where no limit is given


class TimeIsUp(Exception):
    """Signal that ends a run at its time limit; it holds the evaluations so far."""

    def __init__(self, history: list[Evaluation]) -> None:
        self.history = history


class TimeLimit(Callback):
    """Callback that ends a run when its time is up."""

    def __init__(self, until_s: float) -> None:
        self._until_s = until_s
        self._history: list[Evaluation] = []

    def evaluated(self, history: list[Evaluation], worker_totals: list[WorkerTotals]) -> None:
        self._history = list(history)

    def stepped(self, step: int, loss: Tensor, worker: Worker) -> None:
        if worker.seconds >= self._until_s:
            raise TimeIsUp(self._history)


class AbsencesEnd(Callback):
    """Callback that ends a run with an error when it has outlasted what is known of its absences."""

    def __init__(self, known_s: float) -> None:
        self._known_s = known_s

    def stepped(self, step: int, loss: Tensor, worker: Worker) -> None:
        if worker.seconds > self._known_s:
            raise SettingError(
                f"after step {step} the run has outlasted its trace of {self._known_s:g} s, in which it is "
                "known who is away: let it end sooner, by fewer steps or a time limit, or give a longer trace"
            )


def churned(job: Job, cluster: Cluster, until_s: float) -> Cluster:
    """Return the cluster with the absences of its churn until then; a server's first worker stays."""
    source = churn_of(cluster)
    served = job.strategy.server_half() is not None
    return cluster if source is None else source.applied(cluster, job.seed, until_s, spared=int(served))


def longest_s(cluster: Cluster, steps: int) -> float:
    """Return the seconds for which absences are drawn, where a run has no time limit."""
    return LONGER * steps * max(usual_seconds(group.step_s) for group in cluster.workers)
