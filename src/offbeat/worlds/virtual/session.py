"""The virtual world: any cluster in one process, training real models under a clock of its own.

Every worker is a coroutine: the training loop, with the same strategy classes as over processes. Gradients
are computed for real and at once; what they cost on the cluster is charged to virtual time, and so is every
operation, by the links it crosses and by what else crosses them.
"""

from __future__ import annotations

import gc
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from offbeat.core.blocks import Block, trainable_bytes
from offbeat.core.conductor import Conductor, perform
from offbeat.core.gradients import GradientBuckets
from offbeat.core.ledger import Ledger, WorkerTotals
from offbeat.core.pending import Pending
from offbeat.core.port import CollectivePort, Lane, ServerPort, Signature, Usage
from offbeat.core.replica import Replica
from offbeat.experiments.loop import Callback, Evaluation, Job, Worker, arrival_lag, meet, train
from offbeat.experiments.tasks import Batch, Data
from offbeat.server.client import ServerClient
from offbeat.server.optimizer_spec import spec_of
from offbeat.worlds.virtual.cluster import Cluster
from offbeat.worlds.virtual.collectives import CollectiveQueue
from offbeat.worlds.virtual.network import Network
from offbeat.worlds.virtual.scheduler import Never, Scheduler
from offbeat.worlds.virtual.server import VirtualServer, VirtualTransport

T = TypeVar("T")


class VirtualPort(CollectivePort):
    """A worker's port in virtual time."""

    def __init__(self, rank: int, meetings: dict[Lane, CollectiveQueue], client: ServerClient | None) -> None:
        super().__init__(rank, meetings[Lane.FRONT].world)
        self._meetings = meetings
        self._client = client  # of the parameter server

    @property
    def ledger(self) -> Ledger:
        return self._meetings[Lane.FRONT].ledgers[self.rank]

    def usage(self) -> Usage:
        return self.ledger.usage()

    def _server_port(self) -> ServerPort | None:
        return self._client

    def _start(self, signature: Signature, tensors: list[Tensor], value: T, lane: Lane) -> Pending[T]:
        return self._meetings[lane].join(self.rank, signature, tensors, value)


class WorkerLeft(Exception):
    """A worker has left for good."""


class VirtualWorker(Worker):
    """A worker whose gradients are real and whose seconds are the cluster's."""

    def __init__(
        self,
        rank: int,
        job: Job,
        cluster: Cluster,
        meetings: dict[Lane, CollectiveQueue],
        server: VirtualServer | None,
        device: torch.device,
    ) -> None:
        self.rank = rank
        self.ledger = Ledger(rank, meetings[Lane.FRONT].events.clock)
        self._task = job.task
        self._seed = job.seed
        self._cluster = cluster
        self._absences = cluster.absences(rank)
        self._everybody = meetings[Lane.FRONT].ledgers
        self._server = server
        self._events = meetings[Lane.FRONT].events
        self._device = device
        self._step = 0
        self._update_s = 0.0
        torch.default_generator.manual_seed(job.seed)  # torch.manual_seed formats three tracebacks a call
        self.model = job.task.build().to(device)
        self._optimizer = job.task.optimizer(self.model)
        self._params = [p for p in self.model.parameters() if p.requires_grad]
        grain = job.strategy.grain(trainable_bytes(self.model))
        apart = job.strategy.apart(self.model)
        replica = Replica(self.model, optimizer=self._optimizer, grain=grain, apart=apart)
        self._client, half = None, job.strategy.server_half()
        if server is not None and half is not None:
            self._client = ServerClient(
                VirtualTransport(rank, server),
                half,
                self.ledger,
                worker=rank,
                world=job.workers,
                weights=replica.weights,
            )
        self.port = VirtualPort(rank, meetings, self._client)
        self._conductor = Conductor(job.strategy, replica, self.port, self.ledger)
        self._gradients = (
            GradientBuckets(replica, lambda block: None) if job.strategy.wants_blocks() else None
        )
        self._ready = ready_shares(cluster, rank, replica.blocks) if self._gradients else ()
        self._everybody.append(self.ledger)

    async def start(self) -> None:
        with self.ledger.paused():
            await perform(self._conductor.replica.broadcast(self._conductor.port))
            if self._server is not None and self.rank == 0:
                replica, half = self._conductor.replica, self._conductor.strategy.server_half()
                owned = half is not None and half.owns_optimizer
                self._server.open(replica.weights, spec_of(replica) if owned else None)
            await self.meet()
        await self._be_there()

    @property
    def seconds(self) -> float:
        return self.ledger.seconds

    async def backward(self, batch: Batch) -> Tensor:
        began = self._events.now
        seconds = self._cluster.step_seconds(self.rank, self._step, self.ledger.seconds, self._seed)
        self._step += 1
        for param in self._params:
            param.grad = None
        samples = batch[0].size(0)
        self._conductor.replica.coming += samples
        self.ledger.samples += samples
        loss = self._task.gradient(self.model, batch)
        if self._conductor.strategy.wants_loss():
            self._conductor.replica.tell_loss(loss)
        if self._gradients is not None:
            self._gradients.on_backward_end()
            for block, share in zip(self._conductor.replica.blocks, self._ready, strict=True):
                await self._events.sleep(began + seconds * share)
                self._conductor.ready(block)
        self._update_s = seconds * self._cluster.update_share
        if self._events.now < began + seconds - self._update_s:
            await self._events.sleep(began + seconds - self._update_s)
        await self._conductor.begin()
        return loss

    async def update(self) -> None:
        await self._conductor.about_to_update()
        if self._update_s:
            await self._events.sleep(self._events.now + self._update_s)
        self._optimizer.step()
        await self._conductor.update()
        if self._absences:
            await self._be_there()

    @asynccontextmanager
    async def consensus(self, alone: bool) -> AsyncIterator[None]:
        await self._conductor.drain()
        came_s, late_s = self._events.now, 0.0
        with self.ledger.paused():
            if not alone:
                if (
                    self._server is not None
                ):  # one that came back may be behind, and must not wait for this one
                    self._server.rest(self.rank)
                late_s = await arrival_lag(
                    self._conductor.port, self._device, lambda: self._events.now, came_s
                )
            restore = await self._conductor.publish(alone)
            try:
                yield
            finally:
                restore()
            if self._server is not None and not alone:
                self._server.go_on(self.rank)
            if late_s:
                await self._events.sleep(self._events.now + late_s)

    async def meet(self) -> None:
        await meet(self._conductor.port, self._device)

    async def entries(self, alone: bool) -> list[WorkerTotals]:
        return [ledger.totals() for ledger in (self._everybody if self.rank == 0 else [self.ledger])]

    async def _be_there(self) -> None:
        """A worker that is away does nothing until it returns.

        A server forgets it meanwhile, and it comes back as a process that was started anew. Without a server
        the others wait, for one that never returns in vain.
        """
        for away in self._absences:
            now_s = self.ledger.seconds
            if away.from_s <= now_s < away.until_s:
                if self._server is not None:
                    await self._conductor.drain()  # it had asked for that, and gets it
                    self._server.leave(self.rank)
                if away.until_s == math.inf:
                    if self._server is not None and self.rank:  # worker 0 is the one who looks at the model
                        raise WorkerLeft
                    await Never(f"nothing: it left for good at {away.from_s:g} s")
                await self._events.sleep(self._events.now + away.until_s - now_s)
                if self._server is not None:
                    await self._come_back(self._server)

    async def _come_back(self, server: VirtualServer) -> None:
        conductor = self._conductor
        server.join(self.rank)
        if self._client is not None:
            self._client.rejoin()
        conductor.state = conductor.strategy.init(conductor.replica)
        self._optimizer.state.clear()
        await conductor.port.server.pull(conductor.replica.weights, None)


def ready_shares(cluster: Cluster, rank: int, blocks: list[Block]) -> tuple[float, ...]:
    """At which part of a step each block is complete: as measured, or else evenly by bytes over backward."""
    forward, end = cluster.forward_share, 1 - cluster.update_share
    measured = cluster.ready_shares(rank)
    if len(measured) == len(blocks):
        # What was measured is this rank's, where the update begins is all ranks': no step is to take longer.
        return tuple(min(share, end) for share in measured)
    total = sum(block.numel for block in blocks)
    done = accumulate(block.numel for block in blocks)
    return tuple(end if d == total else forward + (end - forward) * d / total for d in done)


def simulate(
    job: Job,
    cluster: Cluster,
    data: Data,
    watchers: Callable[[list[Ledger]], Sequence[Callback]] = lambda ledgers: (),
    device: torch.device | str = "cpu",
) -> list[Evaluation]:
    """Train on a virtual cluster; the history, in virtual seconds."""
    job = job.with_epoch(len(data))  # says so if there are too many workers
    cluster = cluster.for_workers(job.workers)
    events = Scheduler(Network(cluster))
    ledgers: list[Ledger] = []
    meetings = {lane: CollectiveQueue(lane, events, ledgers, job.workers) for lane in Lane}
    half = job.strategy.server_half()
    server = VirtualServer(events, cluster, half, ledgers) if half is not None else None
    where = torch.device(device)
    seen: Sequence[Callback] = ()
    histories: list[list[Evaluation]] = []

    async def work(worker: VirtualWorker) -> None:
        history: list[Evaluation] = []
        try:
            await worker.start()
            history = await train(job, worker, data, seen if worker.rank == 0 else ())
        except WorkerLeft:
            for meeting in meetings.values():
                meeting.depart(worker.rank)
        worker.ledger.stop()
        if worker.rank == 0:
            histories.append(history)

    with rare_collections():
        workers = [VirtualWorker(r, job, cluster, meetings, server, where) for r in range(job.workers)]
        seen = watchers(ledgers)
        works = [work(worker) for worker in workers]
        for worker, working in zip(workers, works, strict=True):
            events.spawn(f"worker {worker.rank}", working)
        try:
            with torch.no_grad():  # once, not at each of a million resumes
                events.run()
        finally:  # an interrupt may come in another's turn: those who watch are told now, not some day
            works[0].close()
    return histories[0]


@contextmanager
def rare_collections() -> Iterator[None]:
    """Thousands of workers live to the end: looking for garbage among them would take half of the time."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(200_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
