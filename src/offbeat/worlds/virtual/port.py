"""A worker's port in virtual time."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from offbeat.core.ledger import Ledger
from offbeat.core.port import Arrived, Lane, Op, Pending, PullResult, Usage, check_slices
from offbeat.worlds.virtual.collectives import CollectiveQueue
from offbeat.worlds.virtual.server import VirtualServer


class VirtualPort:
    """A worker's connection to all others, whose operations take virtual time."""

    def __init__(
        self, rank: int, collectives: dict[Lane, CollectiveQueue], server: VirtualServer | None
    ) -> None:
        self.rank = rank
        self.world = collectives[Lane.FRONT].world
        self._collectives = collectives
        self._server = server

    @property
    def ledger(self) -> Ledger:
        """The ledger of this worker."""
        return self._collectives[Lane.FRONT].ledgers[self.rank]

    def all_reduce(self, tensor: Tensor, op: Op = Op.MEAN, lane: Lane = Lane.FRONT) -> Pending[Tensor]:
        if self.world == 1:
            return Arrived(tensor)
        signature = ("all_reduce", op.value, (tensor.nbytes,))
        return self._collectives[lane].join(self.rank, signature, [tensor], tensor)

    def broadcast(self, tensor: Tensor, root: int = 0, lane: Lane = Lane.FRONT) -> Pending[Tensor]:
        if self.world == 1:
            return Arrived(tensor)
        signature = ("broadcast", str(root), (tensor.nbytes,))
        return self._collectives[lane].join(self.rank, signature, [tensor], tensor)

    def usage(self) -> Usage:
        return self.ledger.usage()

    def record(self, **gauges: float) -> None:
        self.ledger.record(**gauges)

    def reduce_scatter(
        self, shares: list[Tensor], op: Op = Op.MEAN, lane: Lane = Lane.FRONT
    ) -> Pending[Tensor]:
        check_slices(shares, self.world)
        own = shares[self.rank]
        if self.world == 1:
            return Arrived(own)
        signature = ("reduce_scatter", op.value, tuple([share.nbytes for share in shares]))
        return self._collectives[lane].join(self.rank, signature, shares, own)

    def all_gather(self, shares: list[Tensor], lane: Lane = Lane.FRONT) -> Pending[list[Tensor]]:
        check_slices(shares, self.world)
        if self.world == 1:
            return Arrived(shares)
        signature = ("all_gather", "", tuple([share.nbytes for share in shares]))
        return self._collectives[lane].join(self.rank, signature, shares, shares)

    def all_to_all(
        self, away: list[Tensor], into: list[Tensor], lane: Lane = Lane.FRONT
    ) -> Pending[list[Tensor]]:
        check_slices(away, self.world)
        check_slices(into, self.world)
        if self.world == 1:
            return Arrived(into)
        signature = ("all_to_all", "", tuple([tensor.nbytes for tensor in away]))
        return self._collectives[lane].join(self.rank, signature, [*away, *into], into)

    def push(
        self, update: list[Tensor], clock: int, report: Sequence[float] = (), form: int = 0
    ) -> Pending[bool]:
        assert self._server is not None
        return self._server.push(self.rank, update, clock, report, form)

    def combine(self, tensor: Tensor, op: Op = Op.MEAN) -> Pending[Tensor]:
        assert self._server is not None
        return Arrived(tensor) if self.world == 1 else self._server.combine(self.rank, tensor, op)

    def pull(self, into: list[Tensor], clock: int | None, part: int = 0) -> Pending[PullResult]:
        assert self._server is not None
        return self._server.pull(self.rank, into, clock, part)
