"""Simulation: any cluster in one process, training real models in virtual time.

Every worker is a coroutine: a training loop, with the same strategy classes as over processes. Computation
and operations take virtual time. The time of an operation depends on the links that it crosses, and on the
other transfers on those links.

To simulate a model of your own, give a function that builds it, the gradient of its loss, a strategy and a
training loop.

    def build(rank):
        model = torch.nn.Linear(8, 1)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    async def train(session):
        for inputs, targets in batches(session.rank):
            await session.backward((inputs, targets), samples=len(inputs))
            await session.update()
        return session.seconds

    seconds = run_workers(
        4, load_cluster("lan-1g"), offbeat.LocalSGD(period=8), build, autograd(loss), train
    )
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from offbeat.core.ledger import Ledger
from offbeat.core.port import Lane
from offbeat.core.strategy import Strategy
from offbeat.core.validation import unwrap
from offbeat.errors import SettingError
from offbeat.worlds.virtual.cluster import Cluster
from offbeat.worlds.virtual.cohort import CohortSession, StackedGradient, find_cohorts
from offbeat.worlds.virtual.collectives import CollectiveQueue
from offbeat.worlds.virtual.cuda_graphs import Gradient, Trust
from offbeat.worlds.virtual.looking import Lookout
from offbeat.worlds.virtual.network import Network
from offbeat.worlds.virtual.scheduler import Scheduler
from offbeat.worlds.virtual.server import VirtualServer
from offbeat.worlds.virtual.session import VirtualSession, WorkerLeft

T = TypeVar("T")


def run_workers(
    workers: int,
    cluster: Cluster,
    strategy: Strategy[Any],
    build: Callable[[int], tuple[nn.Module, Optimizer | Sequence[Optimizer]]],
    gradient: Gradient,
    train: Callable[[VirtualSession], Coroutine[Any, Any, T]],
    *,
    stacked: StackedGradient | None = None,
    seed: int = 0,
    buffers: str = "average",
    steps_per_epoch: int | None = None,
    on_start: Callable[[list[VirtualSession]], None] = lambda sessions: None,
    graphs: bool = False,
) -> list[T | None]:
    """Run `train` once per worker in virtual time; return the results, None for a worker that left for good.

    cluster           the machines and links, such as `load_cluster("lan-1g")`
    build             builds the model and the optimizers of a rank; all ranks start with rank 0's weights
    gradient          the gradient of the loss: `autograd(loss)` for a loss of the model and a batch
    train             the training loop of a session: a coroutine function that awaits
                      `session.backward(batch, samples)` and `session.update()`, and returns any result
    stacked           the gradients of several workers at once: workers that are alike are then computed
                      together, where that changes no result (`cohort.py`), and share the first one's `train`
    seed              seed of random step times, for clusters that have them
    buffers           how the model's buffers are synchronized, as for `offbeat.attach`
    steps_per_epoch   steps of one worker per epoch, for strategies that go by epochs
    on_start          called with all sessions before the first step, for example to record timelines
    graphs            on a GPU, replay gradients from CUDA graphs (`cuda_graphs.py`)
    """
    cluster = cluster.for_workers(workers)
    if cluster.hung or cluster.cut_off:
        raise SettingError(
            "the cluster has workers that are [[hung]] or [[cut_off]], which only elastic workers outlive: "
            "simulate with elastic=True"
        )
    scheduler = Scheduler(Network(cluster))
    ledgers: list[Ledger] = []
    worker_0 = build(0)
    strategy = strategy.for_optimizers(unwrap(worker_0[1]))
    cohorts = None if stacked is None else find_cohorts(cluster, strategy, *worker_0)
    collectives = {lane: CollectiveQueue(lane, scheduler, ledgers, workers, cohorts=cohorts) for lane in Lane}
    lookout = Lookout(scheduler, ledgers, workers, cohorts)
    half = strategy.server_half()
    server = None if half is None else VirtualServer(scheduler, cluster, half, ledgers)
    results: list[T | None] = [None] * workers
    options: dict[str, Any] = {"seed": seed, "buffers": buffers, "steps_per_epoch": steps_per_epoch}
    trust = Trust() if graphs else None

    def make_sessions() -> Iterator[VirtualSession]:
        if stacked is None or cohorts is None:
            for rank in range(workers):
                yield VirtualSession(
                    rank,
                    *(build(rank) if rank else worker_0),
                    strategy,
                    gradient,
                    cluster,
                    collectives,
                    lookout,
                    server,
                    graphs=trust,
                    **options,
                )
            return
        for ranks in cohorts:
            first, _ = build(ranks[0])
            yield CohortSession(
                ranks, first, *build(ranks[0]), strategy, stacked, cluster, collectives, lookout, **options
            )

    async def work(session: VirtualSession) -> None:
        try:
            await session.start()
            result = await train(session)
            for ledger in session.ledgers:
                results[ledger.rank] = result
        except WorkerLeft:
            for queue in collectives.values():
                queue.remove_worker(session.rank)
            lookout.remove_worker(session.rank)
        session.ledger.stop()

    with rare_garbage_collection():
        sessions = list(make_sessions())
        on_start(sessions)
        loops = [work(session) for session in sessions]
        for trained, loop in zip(sessions, loops, strict=True):
            scheduler.spawn(f"worker {trained.rank}", loop)
        try:
            with torch.no_grad():  # once, instead of at each of a million resumes
                scheduler.run()
        finally:  # after an interrupt while another worker runs, worker 0's loop must still close its files
            loops[0].close()
    return results


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Collect garbage rarely inside this context: scanning thousands of live workers takes half the time."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(200_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
