"""Ports without a wire: one that notes what would be started, with neighbours that always agree."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from offbeat.core.pending import Arrived, Pending
from offbeat.core.port import CollectivePort, Lane, ServerPort, Signature, Usage

T = TypeVar("T")


class NotingPort(CollectivePort):
    """A port of one of several workers; the others hold the same tensors, so a mean changes nothing."""

    def __init__(self, rank: int = 0, world: int = 1, server: ServerPort | None = None) -> None:
        super().__init__(rank, world)
        self.started: list[tuple[Signature, Lane]] = []
        self.gauges: dict[str, float] = {}
        self._its_server = server

    def usage(self) -> Usage:
        return Usage(0.0, 0.0, 0)

    def record(self, **gauges: float) -> None:
        self.gauges.update(gauges)

    def _server_port(self) -> ServerPort | None:
        return self._its_server

    def _start(self, signature: Signature, tensors: list[Tensor], value: T, lane: Lane) -> Pending[T]:
        self.started.append((signature, lane))
        return Arrived(value)
