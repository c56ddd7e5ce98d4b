"""Runs in virtual time: the training loop of both worlds over virtual sessions, with summary and timeline."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.core.ledger import Ledger, WorkerTotals
from offbeat.core.validation import check_attachable
from offbeat.data.work import SharedCount
from offbeat.experiments import timeline, trace
from offbeat.experiments.callbacks.recorder import Recorder
from offbeat.experiments.elastic_run import simulate_elastic
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback, CallbackFactory, Evaluation, seed_step, train
from offbeat.experiments.summary import Summary
from offbeat.experiments.tasks import Batch, Data
from offbeat.experiments.time_limit import AbsencesEnd, TimeIsUp, TimeLimit, churned, longest_s
from offbeat.experiments.virtual_worker import VirtualWorker
from offbeat.server.half import for_optimizers, log_caution
from offbeat.worlds.virtual.cluster import Cluster, load_cluster
from offbeat.worlds.virtual.session import VirtualSession
from offbeat.worlds.virtual.simulation import run_workers
from offbeat.worlds.virtual.spot_trace import SpotTrace

SMALL = 1_000_000  # parameters: operations on fewer are too short for several threads to gain anything


def simulate(
    job: Job,
    cluster: Cluster,
    data: Data,
    make_callbacks: Callable[[list[Ledger]], Sequence[Callback]] = lambda ledgers: (),
    device: torch.device | str = "cpu",
    minimum: int | None = None,
    graphs: bool = True,
    until_s: float | None = None,
) -> list[Evaluation]:
    """Train a job on a virtual cluster; return the evaluations, in virtual seconds.

    With `minimum`, workers are elastic: they go on for as long as so many are left. On a GPU gradients are
    replayed from CUDA graphs, unless `graphs` is False or workers are elastic. With `until_s` the run ends
    then, if not before. If the cluster has churn, its workers come and go; of those with a server all but
    the first, which evaluates.
    """
    if minimum is not None:
        job.check_elastic(minimum)
    steps_per_epoch = job.steps_per_epoch(len(data))  # raises an error if there are too many workers
    cluster = cluster.for_workers(job.workers)
    if job.task.step_s is not None:
        cluster = cluster.with_step_seconds(job.task.step_s)
    ends: list[TimeLimit | AbsencesEnd] = [] if until_s is None else [TimeLimit(until_s)]
    if cluster.churn is not None:
        known_s = until_s or longest_s(cluster, job.total_steps(len(data)))
        cluster = churned(job, cluster, known_s)
        ends.append(AbsencesEnd(known_s))
    ledgers: list[Ledger] = []
    callbacks: list[Callback] = []
    claims = SharedCount(job.workers * job.total_steps(len(data)))  # claims are made ahead, and cost no time

    def build(rank: int) -> tuple[nn.Module, list[Optimizer]]:
        torch.default_generator.manual_seed(job.seed)  # torch.manual_seed formats three tracebacks per call
        model = job.task.build().to(device)
        optimizers = job.task.optimizers(model)
        if rank == 0:
            if sum(param.numel() for param in model.parameters()) < SMALL:
                torch.set_num_threads(1)
            check_attachable(model, optimizers, job.strategy)
            log_caution(for_optimizers(job.strategy, optimizers), optimizers)
        return model, optimizers

    def on_start(sessions: list[VirtualSession]) -> None:
        ledgers.extend(ledger for session in sessions for ledger in session.ledgers)
        callbacks.extend(all_callbacks(ledgers))

    def all_callbacks(of_workers: list[Ledger]) -> list[Callback]:
        return [*make_callbacks(of_workers), *ends]

    async def run(session: VirtualSession) -> list[Evaluation]:
        worker = VirtualWorker(session, claims)
        return await train(job, worker, data, callbacks if session.rank == 0 else ())

    def stacked(model: nn.Module, batch: Batch, ranks: range, step: int) -> Tensor:
        return job.task.stacked_gradient(model, batch, lambda row: seed_step(job.seed, ranks[row], step))

    threads = torch.get_num_threads()
    try:
        if minimum is not None:
            pace = {"seed": job.seed, "steps_per_epoch": steps_per_epoch}
            return simulate_elastic(job, cluster, data, build, all_callbacks, minimum, **pace)
        histories = run_workers(
            job.workers,
            cluster,
            job.strategy,
            build,
            job.task.gradient,
            run,
            stacked=stacked if job.task.stacks and not job.task.max_norm and not job.inject else None,
            seed=job.seed,
            steps_per_epoch=steps_per_epoch,
            on_start=on_start,
            graphs=graphs and torch.device(device).type == "cuda",
        )
    except TimeIsUp as reached:
        return reached.history
    finally:
        torch.set_num_threads(threads)
    return histories[0] or []


def simulate_here(
    job: Job,
    cluster: str | Path | Cluster,
    data: Data,
    out: Path,
    make_callbacks: CallbackFactory,
    device: torch.device | str = "cpu",
    trace_file: Path | None = None,
    minimum: int | None = None,
    spot: SpotTrace | None = None,
    until_s: float | None = None,
) -> Summary:
    """Simulate a job on a preset, cluster file or cluster; return the summary that was written to `out`.

    With `minimum`, workers are elastic. With `spot`, they are away when it says so; of workers with a server
    all but the first, which evaluates. With `until_s` the run ends then, if not before.
    """
    described = load_cluster(cluster)
    name = described.summary if isinstance(cluster, Cluster) else str(cluster)
    ledgers: list[Ledger] = []
    callbacks: list[Callback] = []

    def prepare(of_workers: list[Ledger]) -> list[Callback]:
        ledgers.extend(of_workers)
        for ledger in ledgers[: None if trace_file else timeline.EXCERPT_WORKERS]:
            ledger.spans = [] if trace_file else deque(maxlen=timeline.EXCERPT_SPANS)

        def latest() -> list[WorkerTotals]:
            return [ledger.totals() for ledger in ledgers]

        recorder = Recorder(job, "virtual", out, latest, until_s=until_s, cluster=name)
        callbacks.extend([recorder, *make_callbacks(latest)])
        return callbacks

    if spot is not None:
        served = job.strategy.server_half() is not None
        described = spot.applied(
            described.for_workers(job.workers), job.seed, spot.seconds, spared=1 if served else 0
        )
        callbacks.append(AbsencesEnd(spot.seconds))
    simulate(job, described, data, prepare, device, minimum, until_s=until_s)
    spans = [list(ledger.spans or ()) for ledger in ledgers]
    if trace_file is not None:
        trace.write(trace_file, spans)
    for callback in callbacks:
        callback.ended(spans)
    summary: Summary = json.loads((out / "summary.json").read_text())
    return summary
