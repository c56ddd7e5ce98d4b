"""A worker's port in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

from offbeat.core.ledger import Ledger
from offbeat.core.pending import Pending
from offbeat.core.port import CollectivePort, Lane, ServerPort, Signature
from offbeat.worlds.virtual.collectives import CollectiveQueue
from offbeat.worlds.virtual.computing import Core, Decoding, packet_bytes
from offbeat.worlds.virtual.costs import FREE, CodecCost

T = TypeVar("T")


class VirtualPort(CollectivePort):
    """A worker's connection to all other workers, whose operations take virtual time."""

    def __init__(
        self,
        rank: int,
        collectives: dict[Lane, CollectiveQueue],
        ledger: Ledger,
        core: Core | None = None,
        cost: CodecCost = FREE,
    ) -> None:
        super().__init__(rank, collectives[Lane.FRONT].world, ledger)
        self._collectives = collectives
        self._core = None if cost == FREE else core
        self._cost = cost
        self._client: ServerPort | None = None

    def connect(self, client: ServerPort) -> None:
        """Make `client` the connection to the parameter server."""
        self._client = client

    def _server_port(self) -> ServerPort | None:
        return self._client

    def _start(self, signature: Signature, tensors: Sequence[Tensor], value: T, lane: Lane) -> Pending[T]:
        queue = self._collectives[lane]
        if self._core is None or self.ledger.is_paused:
            return queue.join(self.rank, signature, tensors, value)
        encoded, decoded = packet_bytes(signature, self.rank)
        self._core.encode(self._cost, encoded)
        event = queue.join(self.rank, signature, tensors, value, self._core.delay_s)
        return Decoding(event, self._core, self._cost.decode_s * decoded)
