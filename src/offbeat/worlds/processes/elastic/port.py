"""Port of a process whose roster may change, over gloo.

A reduction works on a copy, so its input is there until the result is committed.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.core.elastic_port import RosterOperation, RosterPort
from offbeat.core.ledger import Ledger
from offbeat.core.membership import Member
from offbeat.core.pending import block_on
from offbeat.core.port import Lane, Op, Signature
from offbeat.core.roster import Roster
from offbeat.worlds.processes.elastic.groups import RosterGroups
from offbeat.worlds.processes.elastic.heartbeat import Heartbeat

T = TypeVar("T")
_REDUCTIONS = {Op.SUM: dist.ReduceOp.SUM, Op.MEAN: dist.ReduceOp.SUM, Op.MAX: dist.ReduceOp.MAX}


class ElasticExit:
    """Exit of a worker, as closing an attachment asks for it: here no worker waits for another."""

    def __init__(self, store: dist.Store, heartbeat: Heartbeat) -> None:
        self.store = store
        self._heartbeat = heartbeat

    def leave(self, operations: int, reason: str) -> None:
        """Let the others know that this worker leaves."""
        self._heartbeat.leave(reason)

    def wait_for_exit(self, patience_s: float) -> None:
        """Do nothing: every committed operation has ended on all workers, and the store lives on."""


class ElasticPort(RosterPort):
    """One process's connection to whoever is in the roster, over gloo."""

    standalone = False
    client = None  # strategies with a parameter server are not elastic
    shaper = None

    def __init__(
        self,
        member: Member,
        groups: RosterGroups,
        heartbeat: Heartbeat,
        store: dist.Store,
        ledger: Ledger,
        timeout_s: float,
        on_end: Callable[[bool], None],
    ) -> None:
        super().__init__(member, ledger)
        self.groups = groups
        self.failures = ElasticExit(store, heartbeat)
        self.timeout_s = timeout_s
        self._heartbeat = heartbeat
        self._on_end = on_end
        self._free: defaultdict[tuple[int, torch.dtype, torch.device], list[Tensor]] = defaultdict(list)

    async def _connect(self, roster: Roster) -> bool:
        self._free.clear()
        return await self.groups.connect(roster)

    def is_open(self, lane: Lane) -> bool:
        return self.groups.is_open(lane)

    async def open(self, lane: Lane) -> bool:
        return await self.groups.open(lane)

    def _operation(
        self, signature: Signature, tensors: list[Tensor], value: T, lane: Lane
    ) -> ElasticOperation[T]:
        kinds: dict[str, type[ElasticOperation[Any]]] = {
            "all_reduce": AllReduce,
            "broadcast": Broadcast,
            "all_gather": AllGather,
        }
        return kinds[signature.operation](self, signature, tensors, value, lane)

    async def hand_over(self, roster: Roster, makers: list[Callable[[], Tensor]]) -> list[Tensor] | None:
        return self.groups.hand_over(roster, makers)

    @property
    def alone(self) -> bool:
        """True if the roster has no other worker."""
        return self.world == 1

    def meet(self, call: str) -> None:
        """Do nothing: workers that are lost in a call are left behind by its operations."""

    def leave(self, reason: str) -> None:
        """Let the others know that this worker leaves."""
        self.failures.leave(self.operations, reason)

    def wait_for_exit(self) -> None:
        """Do nothing: here no worker waits for another."""
        self.failures.wait_for_exit(self.timeout_s)

    def close(self) -> None:
        """Leave the others and release the groups; every operation must have ended."""
        self._heartbeat.leave("")
        self.groups.disconnect()
        self.groups.wait_for_discarded()
        self._on_end(True)

    def abandon(self) -> None:
        """End all operations in progress after a failure."""
        self.groups.disconnect()
        self.groups.wait_for_discarded()
        self._on_end(False)

    def give_up(self, reason: str) -> None:
        self.leave(reason)
        self.abandon()

    # --- copies that operations work on: memory of committed operations is used again

    def take_copy(self, like: Tensor) -> Tensor:
        """Return memory like this tensor's."""
        free = self._free[like.numel(), like.dtype, like.device]
        return free.pop() if free else torch.empty(like.numel(), dtype=like.dtype, device=like.device)

    def give_back(self, copy: Tensor) -> None:
        """Keep a copy for later operations."""
        self._free[copy.numel(), copy.dtype, copy.device].append(copy)


class ElasticOperation(RosterOperation[T]):
    """An operation of process groups."""

    _port: ElasticPort

    def __init__(
        self, port: ElasticPort, signature: Signature, tensors: list[Tensor], value: T, lane: Lane
    ) -> None:
        super().__init__(port, signature, tensors, value, lane)
        self._started_at = time.monotonic()
        self._work: Any = None

    def wait(self) -> None:
        began = time.monotonic()
        block_on(self._port.lanes.commit(self._lane))
        self._port.ledger.waited(time.monotonic() - began)

    def _launch(self) -> None:
        group, ledger = self._port.groups.of(self._lane), self._port.ledger
        if group is None:
            self._work = None
            return
        nbytes = self._launch_in(group)
        ledger.sent(nbytes)
        ledger.operation_started(nbytes)
        self._work.get_future().add_done_callback(lambda _: ledger.operation_ended())  # on another thread

    async def ended(self) -> bool:
        if self._work is None or self._port.groups.wait(self._work):
            return True
        self._port.groups.disconnect()  # the operations of those who wait for this worker fail at once, too
        return False

    def _deliver(self) -> None:
        if self._work is not None:
            self._write_result()
            self._work = None
        self._port.ledger.record_span(
            self._lane.value,
            str(self._number),
            self._started_at,
            operation=self._signature.operation,
            nbytes=sum(self._signature.nbytes),
        )

    @abstractmethod
    def _launch_in(self, group: Any) -> int:
        """Start the operation in this group, and return the bytes that this worker sends."""

    @abstractmethod
    def _write_result(self) -> None:
        """Write the result to the caller's tensors."""


class AllReduce(ElasticOperation[T]):
    """The sum, mean or maximum over the roster."""

    def _launch_in(self, group: Any) -> int:
        (tensor,), op, world = self._tensors, Op(self._signature.detail), self._port.world
        self._copy = self._port.take_copy(tensor)
        if op is Op.MEAN:  # before the sum, as without elastic: the same bits
            torch.mul(tensor.view(-1), 1 / world, out=self._copy)
        else:
            self._copy.copy_(tensor.view(-1))
        options = dist.AllreduceOptions()
        options.reduceOp = _REDUCTIONS[op]  # type: ignore[assignment]
        self._work = group.allreduce([self._copy], options)
        return int(2 * tensor.nbytes * (world - 1) // world)

    def _write_result(self) -> None:
        self._tensors[0].view(-1).copy_(self._copy)
        self._port.give_back(self._copy)


class Broadcast(ElasticOperation[T]):
    """The tensor of the roster's first worker."""

    def _launch_in(self, group: Any) -> int:
        (tensor,), world = self._tensors, self._port.world
        self._copy = self._port.take_copy(tensor)
        self._copy.copy_(tensor.view(-1))
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._work = group.broadcast([self._copy], options)
        return int(tensor.nbytes * (world - 1) // world)

    def _write_result(self) -> None:
        self._tensors[0].view(-1).copy_(self._copy)
        self._port.give_back(self._copy)


class AllGather(ElasticOperation[T]):
    """The packets of the roster, in the order of ranks; the caller's list becomes as long as the roster."""

    def _launch_in(self, group: Any) -> int:
        own = self._tensors[self._port.rank]
        self._work = group.allgather([self._tensors], [own])
        return (self._port.world - 1) * own.nbytes

    def _write_result(self) -> None:
        """Do nothing: packets were received where the caller reads them."""
