"""The virtual world: any cluster in one process, training real models under a clock of its own.

Every worker is a coroutine: the training loop, with the same strategy classes as over processes. Gradients
are computed for real and at once; what they cost on the cluster is charged to virtual time, and so is every
operation, by the links it crosses and by what else crosses them.
"""

from __future__ import annotations

import gc
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.conductor import Conductor, perform
from offbeat.errors import MismatchError
from offbeat.gradients import Gradients
from offbeat.ledger import Entry, Ledger
from offbeat.port import Arrived, Lane, Op, Pending
from offbeat.replica import Block, Replica, trainable_bytes
from offbeat.sampling import steps_per_epoch
from offbeat.tasks import Batch, Data
from offbeat.train import Job, Point, Watcher, Worker, lateness, meet, train
from offbeat.worlds.costs import Cluster
from offbeat.worlds.events import Booked, Events, never
from offbeat.worlds.network import Network
from offbeat.worlds.ring import ring_sum
from offbeat.worlds.virtual_server import VirtualServer


@dataclass(eq=False)
class Collective:
    """One operation of all workers: it starts when the last one has come, and its lane is free."""

    number: int
    kind: tuple[str, str, int]  # what is done, how, and with how many bytes: the same for all
    free: bool  # part of an evaluation: costs nothing
    guests: dict[int, Guest] = field(default_factory=dict)  # by rank


class Guest(NamedTuple):
    """What a worker brings to an operation, when it came, and what it awaits."""

    tensor: Tensor
    came_s: float
    result: Booked[Tensor]


class Meeting:
    """Where the workers' operations of one lane meet, in order."""

    def __init__(self, lane: Lane, events: Events, ledgers: list[Ledger], world: int) -> None:
        self.lane = lane.value
        self.events = events
        self.world = world
        self.ledgers = ledgers
        self._calls = [0] * world  # by rank
        self._open: dict[int, Collective] = {}  # by number
        self._queue: deque[Collective] = deque()

    def join(self, rank: int, kind: tuple[str, str, int], tensor: Tensor) -> Booked[Tensor]:
        number = self._calls[rank] = self._calls[rank] + 1
        free = self.ledgers[rank].resting
        operation = self._open.get(number)
        if operation is None:
            operation = self._open[number] = Collective(number, kind, free)
        if operation.kind != kind:
            other = next(iter(operation.guests))
            raise MismatchError(
                f"operation {number} on lane {self.lane}: worker {rank} comes with {_words(kind)}, "
                f"worker {other} with {_words(operation.kind)}"
            )
        signal: Booked[Tensor] = Booked(self.events, self.ledgers[rank], lambda: self.reason(operation))
        operation.guests[rank] = Guest(tensor, self.events.now, signal)
        if not free:
            self.ledgers[rank].under_way(+1)
        if len(operation.guests) == self.world:
            del self._open[number]
            self._queue.append(operation)
            if len(self._queue) == 1:
                self._start(operation)
        return signal

    def _start(self, operation: Collective) -> None:
        action, how, nbytes = operation.kind
        network, everybody = self.events.network, range(self.world)
        if operation.free or self.world == 1:
            self.events.at(self.events.now, lambda: self._finish(operation))
            return
        if action == "reduce":
            transfer = network.allreduce(nbytes, everybody)
        else:
            transfer = network.broadcast(nbytes, everybody, int(how))
        for rank, sent in zip(transfer.senders.tolist(), transfer.sent.tolist(), strict=True):
            self.ledgers[rank].sent(sent)
        self.events.carry(transfer, lambda: self._finish(operation))

    def _finish(self, operation: Collective) -> None:
        action, how, _ = operation.kind
        guests = [operation.guests[rank] for rank in range(self.world)]
        tensors = [guest.tensor for guest in guests]
        with torch.no_grad():
            if action == "reduce":
                reduce_all(tensors, Op(how))
            else:
                for tensor in tensors:
                    tensor.copy_(tensors[int(how)])
        name = str(operation.number)
        for guest, ledger in zip(guests, self.ledgers, strict=True):
            if not operation.free:
                ledger.under_way(-1)
                ledger.carried(self.lane, name, guest.came_s)
            guest.result.happen(guest.tensor)
        self._queue.popleft()
        if self._queue:
            self._start(self._queue[0])

    def reason(self, operation: Collective) -> str:
        missing = [str(rank) for rank in range(self.world) if rank not in operation.guests]
        what = f"operation {operation.number} on lane {self.lane} ({_words(operation.kind)})"
        return f"{what}, to which worker {', '.join(missing[:8])} has not come"


def _words(kind: tuple[str, str, int]) -> str:
    return f"{kind[0]} {kind[1]} of {kind[2]} bytes"


def reduce_all(tensors: list[Tensor], op: Op) -> None:
    """What a ring all-reduce would leave in every tensor, to the bit where the ring is small."""
    total = torch.stack(tensors).amax(0) if op is Op.MAX else ring_sum(tensors, mean=op is Op.MEAN)
    for tensor in tensors:
        tensor.copy_(total)


class VirtualPort:
    """A worker's door, in virtual time."""

    def __init__(self, rank: int, meetings: dict[Lane, Meeting], server: VirtualServer | None) -> None:
        self.rank = rank
        self.world = meetings[Lane.FRONT].world
        self._meetings = meetings
        self._server = server

    def reduce(self, tensor: Tensor, op: Op = Op.MEAN, lane: Lane = Lane.FRONT) -> Pending[Tensor]:
        if self.world == 1:
            return Arrived(tensor)
        return self._meetings[lane].join(self.rank, ("reduce", op.value, tensor.nbytes), tensor)

    def broadcast(self, tensor: Tensor, root: int = 0, lane: Lane = Lane.FRONT) -> Pending[Tensor]:
        if self.world == 1:
            return Arrived(tensor)
        return self._meetings[lane].join(self.rank, ("broadcast", str(root), tensor.nbytes), tensor)

    def push(self, update: list[Tensor], clock: int) -> Pending[bool]:
        assert self._server is not None
        return self._server.push(self.rank, update, clock)

    def pull(self, into: list[Tensor], clock: int | None) -> Pending[int]:
        assert self._server is not None
        return self._server.pull(self.rank, into, clock)


class VirtualWorker(Worker):
    """A worker whose gradients are real and whose seconds are the cluster's."""

    def __init__(
        self,
        rank: int,
        job: Job,
        cluster: Cluster,
        meetings: dict[Lane, Meeting],
        server: VirtualServer | None,
        device: torch.device,
    ) -> None:
        self.rank = rank
        self.ledger = Ledger(rank, lambda: self._events.now)
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
        torch.manual_seed(job.seed)
        self.model = job.task.build().to(device)
        self._optimizer = job.task.optimizer(self.model)
        self._params = [p for p in self.model.parameters() if p.requires_grad]
        grain = job.strategy.grain(trainable_bytes(self.model))
        replica = Replica(self.model, optimizer=self._optimizer, grain=grain)
        self._conductor = Conductor(job.strategy, replica, VirtualPort(rank, meetings, server), self.ledger)
        self._gradients = Gradients(replica, lambda block: None) if job.strategy.wants_blocks() else None
        self._ready = ready_shares(cluster, rank, replica.blocks) if self._gradients else ()
        self._everybody.append(self.ledger)

    async def start(self) -> None:
        with self.ledger.paused():
            await perform(self._conductor.replica.share(self._conductor.port))
            if self._server is not None and self.rank == 0:
                self._server.open(self._conductor.replica.weights)
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
        if self._gradients is not None:
            self._gradients.end()
            for block, share in zip(self._conductor.replica.blocks, self._ready, strict=True):
                await self._events.sleep(began + seconds * share)
                self._conductor.ready(block)
        self._update_s = seconds * self._cluster.update_share
        if self._events.now < began + seconds - self._update_s:
            await self._events.sleep(began + seconds - self._update_s)
        await self._conductor.begin()
        return loss

    async def update(self) -> None:
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
                late_s = await lateness(self._conductor.port, self._device, lambda: self._events.now, came_s)
            restore = await self._conductor.agree(alone)
            try:
                yield
            finally:
                restore()
            if late_s:
                await self._events.sleep(self._events.now + late_s)

    async def meet(self) -> None:
        await meet(self._conductor.port, self._device)

    async def entries(self, alone: bool) -> list[Entry]:
        return [ledger.entry() for ledger in (self._everybody if self.rank == 0 else [self.ledger])]

    async def _be_there(self) -> None:
        """A worker that is away does nothing until it returns; one that never does is waited for in vain."""
        for away in self._absences:
            now_s = self.ledger.seconds
            if away.from_s <= now_s < away.until_s:
                if away.until_s == math.inf:
                    await never(f"nothing: it left for good at {away.from_s:g} s")
                await self._events.sleep(self._events.now + away.until_s - now_s)


def ready_shares(cluster: Cluster, rank: int, blocks: list[Block]) -> tuple[float, ...]:
    """At which part of a step each block is complete: as measured, or else evenly by bytes over backward."""
    measured = cluster.ready_shares(rank)
    if len(measured) == len(blocks):
        return measured
    total = sum(block.numel for block in blocks)
    done = accumulate(block.numel for block in blocks)
    forward, end = cluster.forward_share, 1 - cluster.update_share
    return tuple(end if d == total else forward + (end - forward) * d / total for d in done)


def simulate(
    job: Job,
    cluster: Cluster,
    data: Data,
    watchers: Callable[[list[Ledger]], Sequence[Watcher]] = lambda ledgers: (),
    device: torch.device | str = "cpu",
) -> list[Point]:
    """Train on a virtual cluster; the history, in virtual seconds."""
    steps_per_epoch(len(data), job.workers, job.task.batch_size)  # says so if there are too many workers
    cluster = cluster.for_workers(job.workers)
    events = Events(Network(cluster))
    ledgers: list[Ledger] = []
    meetings = {lane: Meeting(lane, events, ledgers, job.workers) for lane in Lane}
    rule = job.strategy.rule()
    server = None if rule is None else VirtualServer(events, cluster, rule, ledgers)
    where = torch.device(device)
    seen: Sequence[Watcher] = ()
    histories: list[list[Point]] = []

    async def work(worker: VirtualWorker) -> None:
        await worker.start()
        history = await train(job, worker, data, seen if worker.rank == 0 else ())
        worker.ledger.stop()
        if worker.rank == 0:
            histories.append(history)

    with rare_collections():
        workers = [VirtualWorker(r, job, cluster, meetings, server, where) for r in range(job.workers)]
        seen = watchers(ledgers)
        for worker in workers:
            events.enter(f"worker {worker.rank}", work(worker))
        with torch.no_grad():  # once, not at each of a million resumes
            events.run()
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
