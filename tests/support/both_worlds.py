"""The same job in virtual time and on real processes, with what came of it in the same form."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from offbeat.core.ledger import Ledger, WorkerTotals
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback, Evaluation, Worker
from offbeat.experiments.process_run import ProcessWorker, RunOptions, run
from offbeat.experiments.tasks.digits import Digits
from offbeat.experiments.virtual_run import simulate
from offbeat.worlds.virtual.cluster import Cluster, Slowdown, Workers
from offbeat.worlds.virtual.step_times import Lognormal, Stragglers
from tests.conformance.table import AnyStrategy
from tests.support.beside import lightly
from tests.support.crew import Crew
from tests.support.limits import HANG_S
from tests.support.loops import flat

STEPS, EVERY = 12, 5


@dataclass
class Outcome:
    history: list[Evaluation]
    entries: list[WorkerTotals]
    weights: list[Tensor]  # of each worker, as training left them

    def same_weights(self, other: Outcome) -> bool:
        return all(map(torch.equal, self.weights, other.weights))


def job_of(strategy: AnyStrategy, workers: int, seed: int = 0) -> Job:
    return Job(
        task=Digits(),
        strategy=strategy,
        workers=workers,
        steps=STEPS,
        evaluate_every=EVERY,
        seed=seed,
        work="equal",
    )


@dataclass(frozen=True, kw_only=True)
class KeptDigits(Digits):
    built: list[nn.Module] = field(default_factory=list, compare=False)

    def build(self) -> nn.Module:
        self.built.append(super().build())
        return self.built[-1]


def cluster_of(workers: int, latency_s: float = 0.0) -> Cluster:
    """Workers that straggle and jitter, and worker 1 slow at first; in a ring all NICs send alike."""
    nic = {"up_bits_per_s": 1e8, "down_bits_per_s": 1e8, "latency_s": latency_s, "count": workers // 2}
    straggling = Workers(step_s=Stragglers(usual_s=0.05, probability=0.3, factor=6), **nic)
    jittering = Workers(step_s=Lognormal(median_s=0.04, sigma=0.4), **nic)
    slow = Slowdown(workers=(1,), until_s=0.2, factor=3)
    return Cluster(workers=(straggling, jittering), slow=(slow,), operation_s=1e-4)


def virtually(job: Job, latency_s: float = 0.0) -> Outcome:
    task = KeptDigits()
    ledgers: list[Ledger] = []

    def watchers(books: list[Ledger]) -> tuple[Callback, ...]:
        ledgers.extend(books)
        return ()

    history = simulate(replace(job, task=task), cluster_of(job.workers, latency_s), task.load(), watchers)
    return Outcome(history, [ledger.totals() for ledger in ledgers], [flat(model) for model in task.built])


class Keeper(Callback):
    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.entries: list[WorkerTotals] = []

    def evaluated(self, history: list[Evaluation], worker_totals: list[WorkerTotals]) -> None:
        self.entries = worker_totals


def _really(job: Job) -> tuple[list[Evaluation], list[WorkerTotals], Tensor]:
    kept: list[Keeper] = []

    def watchers(worker: ProcessWorker) -> list[Callback]:
        assert worker.rank == dist.get_rank()
        kept.append(Keeper(worker))
        return [kept[0]]

    history = run(job, RunOptions(timeout_s=HANG_S), watchers)
    return history, kept[0].entries, flat(kept[0].worker.model)


def really(crew: Crew, job: Job) -> Outcome:
    ranks = crew.run(lightly, _really, job)
    return Outcome(ranks[0][0], ranks[0][1], [weights for _, _, weights in ranks])
