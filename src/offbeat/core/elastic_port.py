"""Port of a worker whose roster may change: operations are redone until all of a roster have their results.

An operation keeps its input until its result is committed. All-reduce, broadcast and the all-gather of equal
packets can be redone in another roster. Slices that belong to workers by rank cannot, and are refused.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from offbeat.core.elastic import ElasticLanes
from offbeat.core.ledger import Ledger
from offbeat.core.membership import Member
from offbeat.core.pending import Pending
from offbeat.core.port import CollectivePort, Lane, Op, ServerPort, Signature, SlicesT
from offbeat.core.roster import Roster
from offbeat.errors import OffbeatError

T = TypeVar("T")
REDOABLE = ("all_reduce", "broadcast", "all_gather")


class RosterPort(CollectivePort):
    """One worker's connection to whoever is in the roster. `rank` and `world` change with it."""

    elastic = True

    def __init__(self, member: Member, ledger: Ledger) -> None:
        super().__init__(0, 1, ledger)
        self.member = member
        self.lanes = ElasticLanes(member, self, ledger)
        self.operations = 0

    async def connect(self, roster: Roster) -> bool:
        """Connect a new roster, in which this worker has a new rank."""
        self.rank, self.world = self.member.rank, self.member.world
        return await self._connect(roster)

    def is_open(self, lane: Lane) -> bool:
        """Return whether the lane is connected. Where a roster has all connections at once, it is."""
        return True

    async def open(self, lane: Lane) -> bool:
        """Connect the lane; return False if a worker of the roster cannot be reached."""
        return True

    # A roster of one commits its operations, too: that is where newcomers are admitted.

    def all_reduce(self, tensor: Tensor, op: Op = Op.MEAN, lane: Lane = Lane.FRONT) -> Pending[Tensor]:
        return self._start(Signature("all_reduce", op.value, (tensor.nbytes,)), [tensor], tensor, lane)

    def broadcast(self, tensor: Tensor, root: int = 0, lane: Lane = Lane.FRONT) -> Pending[Tensor]:
        if root != 0:
            raise OffbeatError(f"broadcast from worker {root}: only from worker 0, if the roster may change")
        return self._start(Signature("broadcast", str(root), (tensor.nbytes,)), [tensor], tensor, lane)

    def all_gather(self, slices: SlicesT, lane: Lane = Lane.FRONT) -> Pending[SlicesT]:
        self._check_slices(slices)
        if not isinstance(slices, list) or len({each.nbytes for each in slices}) > 1:
            raise OffbeatError(
                "slices of one tensor, or that differ in size, belong to workers, and cannot be gathered "
                "elastically"
            )
        sizes = tuple(each.nbytes for each in slices)
        return self._start(Signature("all_gather", "slices", sizes), slices, slices, lane)

    def _server_port(self) -> ServerPort | None:
        return None  # strategies with a parameter server are not elastic

    def _start(self, signature: Signature, tensors: Sequence[Tensor], value: T, lane: Lane) -> Pending[T]:
        if signature.operation not in REDOABLE:
            raise OffbeatError(
                f"{signature.operation} cannot be redone if a worker is lost: not under elastic"
            )
        self.operations += 1
        assert isinstance(tensors, list)  # in which other packets take their places, if the roster changes
        operation = self._operation(signature, tensors, value, lane)
        self.lanes.start(operation, lane)
        return operation

    @abstractmethod
    async def _connect(self, roster: Roster) -> bool:
        """Drop all connections and take over the roster; return False if a worker of it cannot be reached."""

    @abstractmethod
    def _operation(
        self, signature: Signature, tensors: list[Tensor], value: T, lane: Lane
    ) -> RosterOperation[T]:
        """Make an operation, which is launched next."""

    @abstractmethod
    async def hand_over(self, roster: Roster, makers: list[Callable[[], Tensor]]) -> list[Tensor] | None:
        """Broadcast tensors from the first member to those who join; None if one of them is lost.

        Each is made when the one before it has arrived.
        """

    @abstractmethod
    def give_up(self, reason: str) -> None:
        """Leave the others, and release all connections, because this worker could not join."""


class RosterOperation(Pending[T], Generic[T]):
    """An operation that keeps its input until it is committed."""

    def __init__(
        self, port: RosterPort, signature: Signature, tensors: list[Tensor], value: T, lane: Lane
    ) -> None:
        self._port = port
        self._tensors = tensors
        self._signature = signature
        self._value = value
        self._lane = lane
        self._number = port.operations
        self._packet = tensors[port.rank] if signature.operation == "all_gather" else None
        self._epoch = port.member.roster.epoch  # in which the packets have their places
        self._delivered = False

    def done(self) -> bool:
        return self._delivered

    def result(self) -> T:
        return self._value

    def launch(self) -> None:
        epoch = self._port.member.roster.epoch
        if self._epoch != epoch and self._packet is not None:
            # Operations of the old roster may still write into its packets, and there may be more or fewer.
            packets = [torch.empty_like(self._packet) for _ in range(self._port.world)]
            packets[self._port.rank] = self._packet = self._packet.clone()
            self._tensors[:] = packets
            self._signature = self._signature._replace(nbytes=tuple(each.nbytes for each in packets))
        self._epoch = epoch
        self._launch()

    @abstractmethod
    def _launch(self) -> None:
        """Start the operation among the current roster."""

    @abstractmethod
    async def ended(self) -> bool:
        """Wait until the operation has ended here; return False if it failed, or never will end."""

    def deliver(self) -> None:
        self._deliver()
        self._delivered = True

    @abstractmethod
    def _deliver(self) -> None:
        """Write the result to the caller's tensors."""
