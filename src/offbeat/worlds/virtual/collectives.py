"""Meeting: where the operations of virtual workers meet, in order, and what each costs and leaves behind."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from offbeat.core.ledger import Ledger
from offbeat.core.port import Lane, Op, Signature
from offbeat.errors import MismatchError
from offbeat.worlds.virtual.reductions import all_gather, all_to_all, reduce_all, reduce_scatter
from offbeat.worlds.virtual.scheduler import Event, Scheduler

T = TypeVar("T")


@dataclass(eq=False)
class Collective:
    """One operation of all workers: it starts when the last one has come, and its lane is free."""

    number: int
    kind: Signature
    free: bool  # part of an evaluation: costs nothing
    guests: dict[int, Participant] = field(default_factory=dict)  # by rank


class Participant(NamedTuple):
    """What a worker brings to an operation, when it came, and what it awaits."""

    tensors: list[Tensor]  # one share a worker, or two, or one tensor
    value: Any  # which of them is the result
    came_s: float
    result: Event[Any]


class CollectiveQueue:
    """Where the workers' operations of one lane meet, in order."""

    def __init__(self, lane: Lane, events: Scheduler, ledgers: list[Ledger], world: int) -> None:
        self.lane = lane.value
        self.events = events
        self.world = world
        self.ledgers = ledgers
        self._calls = [0] * world  # by rank
        self._open: dict[int, Collective] = {}  # by number
        self._queue: deque[Collective] = deque()
        self._gone: set[int] = set()  # workers that left for good, where a server lets the others go on

    def join(self, rank: int, kind: Signature, tensors: list[Tensor], value: T) -> Event[T]:
        number = self._calls[rank] = self._calls[rank] + 1
        free = self.ledgers[rank].is_paused
        operation = self._open.get(number)
        if operation is None:
            operation = self._open[number] = Collective(number, kind, free)
        if operation.kind != kind:
            other = next(iter(operation.guests))
            raise MismatchError(
                f"operation {number} on lane {self.lane}: worker {rank} comes with {_words(kind)}, "
                f"worker {other} with {_words(operation.kind)}"
            )
        signal: Event[T] = Event(self.events, self.ledgers[rank], lambda: self.reason(operation))
        operation.guests[rank] = Participant(tensors, value, self.events.now, signal)
        if not free:
            self.ledgers[rank].under_way(+1, sum(kind[2]))
        if len(operation.guests) == self.world - len(self._gone):
            self._complete(operation)
        return signal

    def depart(self, rank: int) -> None:
        """Nobody is to wait for this worker any more."""
        self._gone.add(rank)
        for operation in list(self._open.values()):
            if len(operation.guests) == self.world - len(self._gone):
                self._complete(operation)

    def _complete(self, operation: Collective) -> None:
        del self._open[operation.number]
        self._queue.append(operation)
        if len(self._queue) == 1:
            self._start(operation)

    def _start(self, operation: Collective) -> None:
        action, how, nbytes = operation.kind
        network, everybody = self.events.network, range(self.world)
        if operation.free or self.world == 1:
            self.events.at(self.events.now, lambda: self._finish(operation))
            return
        if action == "all_reduce":
            transfer = network.allreduce(nbytes[0], everybody)
        elif action == "broadcast":
            transfer = network.broadcast(nbytes[0], everybody, int(how))
        elif action in ("reduce_scatter", "all_to_all"):
            transfer = network.scatter(nbytes, everybody)
        else:
            transfer = network.gather(nbytes, everybody)
        for rank, sent in zip(transfer.senders.tolist(), transfer.sent.tolist(), strict=True):
            self.ledgers[rank].sent(sent)
        self.events.transfer(transfer, lambda: self._finish(operation))

    def _finish(self, operation: Collective) -> None:
        action, how, _ = operation.kind
        guests = sorted(operation.guests.items())  # by rank
        brought = [guest.tensors for _, guest in guests]
        with torch.no_grad():
            if action == "all_reduce":
                reduce_all([tensor for (tensor,) in brought], Op(how))
            elif action == "broadcast":
                for (tensor,) in brought:
                    tensor.copy_(brought[int(how)][0])
            elif action == "reduce_scatter":
                reduce_scatter(brought, Op(how))
            elif action == "all_to_all":
                all_to_all(brought)
            else:
                all_gather(brought)
        name = str(operation.number)
        for rank, guest in guests:
            ledger = self.ledgers[rank]
            if not operation.free:
                ledger.under_way(-1)
                ledger.record_span(self.lane, name, guest.came_s)
            guest.result.succeed(guest.value)
        self._queue.popleft()
        if self._queue:
            self._start(self._queue[0])

    def reason(self, operation: Collective) -> str:
        missing = [str(rank) for rank in range(self.world) if rank not in operation.guests]
        what = f"operation {operation.number} on lane {self.lane} ({_words(operation.kind)})"
        return f"{what}, to which worker {', '.join(missing[:8])} has not come"


def _words(kind: Signature) -> str:
    return f"{kind[0]} {kind[1]} of {', '.join(map(str, kind[2][:8]))} bytes"
