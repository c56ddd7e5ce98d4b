"""Transport of a virtual worker's messages to a parameter server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from offbeat.core.pending import Arrived, Pending
from offbeat.server.client import Operation
from offbeat.server.messages import ClientMessage, Tensors
from offbeat.worlds.virtual.server import VirtualServer

T = TypeVar("T")


class VirtualTransport:
    """One worker's transport to the virtual server."""

    def __init__(self, rank: int, server: VirtualServer) -> None:
        self._rank = rank
        self._server = server

    @property
    def shards(self) -> int:
        return self._server.size

    @property
    def joined_clock(self) -> int:
        return self._server.joined_clock(self._rank)

    def request(
        self,
        operation: Operation,
        messages: Sequence[ClientMessage],
        finish: Callable[[list[Any]], T],
    ) -> Pending[T]:
        return self._server.request(self._rank, operation, messages, finish)

    def read(self, into: list[Tensors]) -> Pending[None]:
        self._server.read(into)
        return Arrived(None)
