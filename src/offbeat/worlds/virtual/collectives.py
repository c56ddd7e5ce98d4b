"""Collective operations in virtual time: matched across workers, in order, then timed and computed."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from offbeat.core.ledger import Ledger
from offbeat.core.port import Lane, Op, Signature
from offbeat.errors import MismatchError
from offbeat.worlds.virtual.flow import Transfer
from offbeat.worlds.virtual.reductions import (
    all_gather,
    all_reduce,
    all_reduce_rows,
    all_to_all,
    reduce_scatter,
)
from offbeat.worlds.virtual.scheduler import Event, Scheduler
from offbeat.worlds.virtual.tcp import is_idle

T = TypeVar("T")


@dataclass
class Shared:
    """A tensor that the first worker has computed from the result of an operation, for all of them."""

    tensor: Tensor | None = None


@dataclass(eq=False)
class Collective:
    """One operation of all workers. It starts when all workers have joined it and its lane is free."""

    number: int
    signature: Signature
    nbytes: int  # of a worker's tensors together
    free: bool  # whether it belongs to an evaluation: it then takes no time, and its bytes do not count
    ready_s: float = 0.0  # when the last worker has encoded its part
    participants: dict[int, Participant] = field(default_factory=dict)  # by rank
    shared: Shared = field(default_factory=Shared)


class Result(Event[T]):
    """One worker's result of a collective operation."""

    __slots__ = ("_shared",)

    def __init__(self, operation: Collective, queue: CollectiveQueue, ledger: Ledger) -> None:
        super().__init__(queue.scheduler, ledger, lambda: queue.reason(operation))
        self._shared = operation.shared  # not the operation, whose participants refer to this: a cycle

    def fill_once(self, into: Tensor, fill: Callable[[], None]) -> None:
        if self._shared.tensor is None:
            fill()
            self._shared.tensor = into.clone()
        else:
            into.copy_(self._shared.tensor)


class Participant(NamedTuple):
    """One worker's tensors in an operation, its time of arrival, and the event that it awaits."""

    tensors: Sequence[Tensor]  # one tensor, or one slice per worker, or two per worker
    value: Any  # the tensors that hold the result
    arrived_s: float
    result: Event[Any]


class CollectiveQueue:
    """The collective operations of one lane, in order.

    Workers that are alike may join together, as a cohort: the first of them joins for all, with tensors that
    have one row for each.
    """

    def __init__(
        self,
        lane: Lane,
        scheduler: Scheduler,
        ledgers: list[Ledger],
        world: int,
        nodes: Sequence[int] | None = None,
        cohorts: Sequence[range] | None = None,
    ) -> None:
        self.lane = lane.value
        self.scheduler = scheduler
        self.world = world
        self.nodes = range(world) if nodes is None else tuple(nodes)  # of the network, by rank
        self._ranks = {node: rank for rank, node in enumerate(self.nodes)}
        self.ledgers = ledgers  # by rank
        self._stacked = cohorts is not None
        self._parties = cohorts or [range(rank, rank + 1) for rank in range(world)]  # that join together
        self._calls = [0] * world  # by rank
        self._open: dict[int, Collective] = {}  # by number
        self._queue: deque[Collective] = deque()
        self._used_s = -math.inf  # when its connections were last used
        self._delayed = 0  # operations that all have joined, and that are not ready
        self._left: set[int] = set()  # workers that left for good, where a server lets the others continue

    def join(
        self, rank: int, signature: Signature, tensors: Sequence[Tensor], value: T, delay_s: float = 0.0
    ) -> Event[T]:
        """Add worker `rank` to its next operation on this lane; return the event of the result.

        The operation starts after the `delay_s` of each worker. A worker's later operations are never ready
        before its earlier ones.
        """
        number = self._calls[rank] = self._calls[rank] + 1
        free = self.ledgers[rank].is_paused
        operation = self._open.get(number)
        if operation is None:
            operation = self._open[number] = Collective(number, signature, sum(signature.nbytes), free)
        if operation.signature != signature:
            other = next(iter(operation.participants))
            raise MismatchError(
                f"operation {number} on lane {self.lane}: worker {rank} calls {_describe(signature)}, "
                f"worker {other} calls {_describe(operation.signature)}"
            )
        result: Result[T] = Result(operation, self, self.ledgers[rank])
        operation.participants[rank] = Participant(tensors, value, self.scheduler.now, result)
        operation.ready_s = max(operation.ready_s, self.scheduler.now + delay_s)
        if not free:
            self.ledgers[rank].operation_started(operation.nbytes)
        if len(operation.participants) == len(self._parties) - len(self._left):
            self._complete(operation)
        return result

    def remove_worker(self, rank: int) -> None:
        """Remove a worker that left for good, so that no operation waits for it."""
        self._left.add(rank)
        for operation in list(self._open.values()):
            if len(operation.participants) == len(self._parties) - len(self._left):
                self._complete(operation)

    def _complete(self, operation: Collective) -> None:
        del self._open[operation.number]
        if operation.ready_s > self.scheduler.now or self._delayed:
            self._delayed += 1
            ready_s = max(operation.ready_s, self.scheduler.now)
            self.scheduler.at(ready_s, lambda: self._start_delayed(operation))
        else:
            self._append(operation)

    def _start_delayed(self, operation: Collective) -> None:
        self._delayed -= 1
        self._append(operation)

    def _append(self, operation: Collective) -> None:
        self._queue.append(operation)
        if len(self._queue) == 1:
            self._start(operation)

    def _start(self, operation: Collective) -> None:
        name, variant, nbytes = operation.signature
        network, workers = self.scheduler.network, self.nodes
        if operation.free or self.world == 1:
            self.scheduler.at(self.scheduler.now, lambda: self._finish(operation))
            return
        if name == "all_reduce":
            transfer = network.all_reduce(nbytes[0], workers)
        elif name == "broadcast":
            transfer = network.broadcast(nbytes[0], workers, workers[int(variant)])
        elif name == "reduce_scatter":
            transfer = network.reduce_scatter(nbytes, workers)
        elif name == "all_to_all":
            transfer = network.all_to_all(nbytes, workers)
        else:
            transfer = network.all_gather(nbytes, workers)
        for node, sent in zip(transfer.senders.tolist(), transfer.sent.tolist(), strict=True):
            self._count_sent(self._ranks[node], sent)
        if transfer.slow_start_s and is_idle(self._used_s, self.scheduler.now, transfer.rtt_s):
            route = transfer.route
            slower = replace(route, latency_s=route.latency_s + transfer.slow_start_s)
            transfer = replace(transfer, route=slower)
        self._transfer(transfer, operation)

    def _count_sent(self, rank: int, nbytes: int) -> None:
        self.ledgers[rank].sent(nbytes)

    def _transfer(self, transfer: Transfer, operation: Collective) -> None:
        self.scheduler.transfer(transfer, lambda: self._finish(operation))

    def _finish(self, operation: Collective) -> None:
        if not operation.free:
            self._used_s = self.scheduler.now
        self._compute(operation)
        for rank in sorted(operation.participants):
            self._end_part(operation, rank)
        self._queue.popleft()
        if self._queue:
            self._start(self._queue[0])

    def _compute(self, operation: Collective) -> None:
        name, variant, _ = operation.signature
        participants = sorted(operation.participants.items())  # by rank
        tensors = [participant.tensors for _, participant in participants]
        with torch.no_grad():
            if self._stacked:
                self._compute_rows(name, variant, [tensor for (tensor,) in tensors])
            elif name == "all_reduce":
                all_reduce([tensor for (tensor,) in tensors], Op(variant))
            elif name == "broadcast":
                for (tensor,) in tensors:
                    tensor.copy_(tensors[int(variant)][0])
            elif name == "reduce_scatter":
                reduce_scatter(tensors, Op(variant))
            elif name == "all_to_all":
                all_to_all(tensors)
            else:
                all_gather(tensors)

    def _end_part(self, operation: Collective, rank: int) -> None:
        participant, ledger = operation.participants[rank], self.ledgers[rank]
        if not operation.free:
            ledger.operation_ended()
            ledger.record_span(
                self.lane,
                str(operation.number),
                participant.arrived_s,
                operation=operation.signature.operation,
                nbytes=operation.nbytes,
            )
        participant.result.succeed(participant.value)

    @staticmethod
    def _compute_rows(name: str, variant: str, stacks: list[Tensor]) -> None:
        if name == "all_reduce":
            all_reduce_rows(stacks, Op(variant))
        else:
            root = torch.cat(stacks)[int(variant)]
            for stack in stacks:
                stack.copy_(root)

    def reason(self, operation: Collective) -> str:
        """Describe the operation and the workers that have not joined it, to be shown on deadlock."""
        absent = [party for party in self._parties if party[0] not in operation.participants]
        missing = [str(rank) for party in absent for rank in party]
        subject = f"operation {operation.number} on lane {self.lane} ({_describe(operation.signature)})"
        return f"{subject}, which worker {', '.join(missing[:8])} has not joined"


def _describe(signature: Signature) -> str:
    name, variant, nbytes = signature
    return f"{name} {variant}".rstrip() + f" of {', '.join(map(str, nbytes[:8]))} bytes"
