"""A worker's port in virtual time."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from offbeat.core.ledger import Ledger
from offbeat.core.pending import Pending
from offbeat.core.port import CollectivePort, Lane, ServerPort, Signature, Usage
from offbeat.worlds.virtual.collectives import CollectiveQueue

T = TypeVar("T")


class VirtualPort(CollectivePort):
    """A worker's connection to all others, whose operations take virtual time."""

    def __init__(self, rank: int, collectives: dict[Lane, CollectiveQueue]) -> None:
        super().__init__(rank, collectives[Lane.FRONT].world)
        self._collectives = collectives
        self._client: ServerPort | None = None

    def connect(self, client: ServerPort) -> None:
        """Make `client` this port's parameter server."""
        self._client = client

    @property
    def ledger(self) -> Ledger:
        """The ledger of this worker."""
        return self._collectives[Lane.FRONT].ledgers[self.rank]

    def usage(self) -> Usage:
        return self.ledger.usage()

    def record(self, **gauges: float) -> None:
        self.ledger.record(**gauges)

    def _server_port(self) -> ServerPort | None:
        return self._client

    def _start(self, signature: Signature, tensors: list[Tensor], value: T, lane: Lane) -> Pending[T]:
        return self._collectives[lane].join(self.rank, signature, tensors, value)
