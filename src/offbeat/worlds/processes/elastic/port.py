"""Port of a worker whose roster may change: operations are redone until all of a roster have their results.

A reduction works on a copy, so its input is there until the result is committed. All-reduce, broadcast and
the all-gather of equal packets can be redone in another roster. Slices that belong to workers by rank cannot,
and are refused.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.core.elastic import ElasticLanes
from offbeat.core.ledger import Ledger
from offbeat.core.membership import Member
from offbeat.core.pending import Pending, block_on
from offbeat.core.port import CollectivePort, Lane, Op, ServerPort, Signature
from offbeat.errors import OffbeatError
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


class ElasticPort(CollectivePort):
    """One worker's connection to whoever is in the roster. `rank` and `world` change with it."""

    elastic = True
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
        super().__init__(0, 1, ledger)
        self.member = member
        self.groups = groups
        self.lanes = ElasticLanes(member, self)
        self.failures = ElasticExit(store, heartbeat)
        self.operations = 0
        self.timeout_s = timeout_s
        self._heartbeat = heartbeat
        self._on_end = on_end
        self._free: defaultdict[tuple[int, torch.dtype, torch.device], list[Tensor]] = defaultdict(list)

    async def connect(self, roster: Any) -> bool:
        """Connect a new roster, in which this worker has a new rank."""
        self.rank, self.world = self.member.rank, self.member.world
        self._free.clear()
        return await self.groups.connect(roster)

    # A roster of one commits its operations, too: that is where newcomers are admitted.

    def all_reduce(self, tensor: Tensor, op: Op = Op.MEAN, lane: Lane = Lane.FRONT) -> Pending[Tensor]:
        return self._start(Signature("all_reduce", op.value, (tensor.nbytes,)), [tensor], tensor, lane)

    def broadcast(self, tensor: Tensor, root: int = 0, lane: Lane = Lane.FRONT) -> Pending[Tensor]:
        if root != 0:
            raise OffbeatError(f"broadcast from worker {root}: only from worker 0, if the roster may change")
        return self._start(Signature("broadcast", str(root), (tensor.nbytes,)), [tensor], tensor, lane)

    def all_gather(self, slices: list[Tensor], lane: Lane = Lane.FRONT) -> Pending[list[Tensor]]:
        self._check_slices(slices)
        if len({each.nbytes for each in slices}) > 1:
            raise OffbeatError(
                "slices that differ in size belong to workers, and cannot be gathered elastically"
            )
        sizes = tuple(each.nbytes for each in slices)
        return self._start(Signature("all_gather", "slices", sizes), slices, slices, lane)

    def _server_port(self) -> ServerPort | None:
        return None

    def _start(self, signature: Signature, tensors: list[Tensor], value: T, lane: Lane) -> Pending[T]:
        kinds: dict[str, type[ElasticOperation[Any]]] = {
            "all_reduce": AllReduce,
            "broadcast": Broadcast,
            "all_gather": AllGather,
        }
        if signature.operation not in kinds:
            raise OffbeatError(
                f"{signature.operation} cannot be redone if a worker is lost: not under elastic"
            )
        self.operations += 1
        operation = kinds[signature.operation](self, signature, tensors, value, lane)
        self.lanes.start(operation, lane)
        return operation

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
        self._on_end(True)

    def abandon(self) -> None:
        """End all operations in progress after a failure."""
        self.groups.disconnect()
        self._on_end(False)

    # --- copies that operations work on: memory of committed operations is used again

    def take_copy(self, like: Tensor) -> Tensor:
        """Return memory like this tensor's."""
        free = self._free[like.numel(), like.dtype, like.device]
        return free.pop() if free else torch.empty(like.numel(), dtype=like.dtype, device=like.device)

    def give_back(self, copy: Tensor) -> None:
        """Keep a copy for later operations."""
        self._free[copy.numel(), copy.dtype, copy.device].append(copy)


class ElasticOperation(Pending[T], Generic[T]):
    """An operation that keeps its input until it is committed."""

    def __init__(
        self, port: ElasticPort, signature: Signature, tensors: list[Tensor], value: T, lane: Lane
    ) -> None:
        self._port = port
        self._tensors = tensors
        self._detail = signature.detail
        self._value = value
        self._lane = lane
        self._number = port.operations
        self._started_at = time.monotonic()
        self._work: Any = None
        self._delivered = False

    # --- as a pending result

    def done(self) -> bool:
        return self._delivered

    def result(self) -> T:
        return self._value

    def wait(self) -> None:
        began = time.monotonic()
        block_on(self._port.lanes.commit(self._lane))
        self._port.ledger.waited(time.monotonic() - began)

    # --- as an operation that may be redone

    def launch(self) -> None:
        group, ledger = self._port.groups.of(self._lane), self._port.ledger
        if group is None:
            self._work = None
            return
        nbytes = self._launch(group)
        ledger.sent(nbytes)
        ledger.operation_started(nbytes)
        self._work.get_future().add_done_callback(lambda _: ledger.operation_ended())  # on another thread

    async def ended(self) -> bool:
        return self._work is None or self._port.groups.wait(self._work)

    def deliver(self) -> None:
        if self._work is not None:
            self._deliver()
            self._work = None
        self._delivered = True
        self._port.ledger.record_span(self._lane.value, str(self._number), self._started_at)

    @abstractmethod
    def _launch(self, group: Any) -> int:
        """Start the operation in this group, and return the bytes that this worker sends."""

    @abstractmethod
    def _deliver(self) -> None:
        """Write the result to the caller's tensors."""


class AllReduce(ElasticOperation[T]):
    """The sum, mean or maximum over the roster."""

    def _launch(self, group: Any) -> int:
        (tensor,), op, world = self._tensors, Op(self._detail), self._port.world
        self._copy = self._port.take_copy(tensor)
        if op is Op.MEAN:  # before the sum, as without elastic: the same bits
            torch.mul(tensor.view(-1), 1 / world, out=self._copy)
        else:
            self._copy.copy_(tensor.view(-1))
        options = dist.AllreduceOptions()
        options.reduceOp = _REDUCTIONS[op]  # type: ignore[assignment]
        self._work = group.allreduce([self._copy], options)
        return int(2 * tensor.nbytes * (world - 1) // world)

    def _deliver(self) -> None:
        self._tensors[0].view(-1).copy_(self._copy)
        self._port.give_back(self._copy)


class Broadcast(ElasticOperation[T]):
    """The tensor of the roster's first worker."""

    def _launch(self, group: Any) -> int:
        (tensor,), world = self._tensors, self._port.world
        self._copy = self._port.take_copy(tensor)
        self._copy.copy_(tensor.view(-1))
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._work = group.broadcast([self._copy], options)
        return int(tensor.nbytes * (world - 1) // world)

    def _deliver(self) -> None:
        self._tensors[0].view(-1).copy_(self._copy)
        self._port.give_back(self._copy)


class AllGather(ElasticOperation[T]):
    """The packets of the roster, in the order of ranks; the caller's list becomes as long as the roster."""

    def __init__(
        self, port: ElasticPort, signature: Signature, tensors: list[Tensor], value: T, lane: Lane
    ) -> None:
        super().__init__(port, signature, tensors, value, lane)
        self._own = tensors[port.rank]
        self._launched = False

    def launch(self) -> None:
        if self._launched:  # operations of the old roster may still write into its packets
            packets = [torch.empty_like(self._own) for _ in range(self._port.world)]
            packets[self._port.rank] = self._own
            self._tensors[:] = packets
        self._launched = True
        super().launch()

    def _launch(self, group: Any) -> int:
        self._work = group.allgather([self._tensors], [self._own])
        return (self._port.world - 1) * self._own.nbytes

    def _deliver(self) -> None:
        """Do nothing: packets were received where the caller reads them."""
