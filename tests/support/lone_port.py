"""Ports without a wire: one that notes what would be started, with neighbours that always agree."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from offbeat.core.ledger import Ledger
from offbeat.core.pending import Arrived, Pending
from offbeat.core.port import CollectivePort, Lane, Op, ServerPort, Signature

T = TypeVar("T")


class NotingPort(CollectivePort):
    """A port of one of several workers; the others hold the same tensors, so a mean changes nothing."""

    def __init__(self, rank: int = 0, world: int = 1, server: ServerPort | None = None) -> None:
        super().__init__(rank, world, Ledger(rank, lambda: 0.0))
        self.started: list[tuple[Signature, Lane]] = []
        self._its_server = server

    def _server_port(self) -> ServerPort | None:
        return self._its_server

    def _start(self, signature: Signature, tensors: list[Tensor], value: T, lane: Lane) -> Pending[T]:
        self.started.append((signature, lane))
        return Arrived(value)


class OtherMember:
    """A port to one other member of a replica, which brings numbers that the test makes up."""

    world = 2

    def __init__(self, *numbers: float) -> None:
        self._numbers = numbers

    def all_reduce(self, values: Tensor, op: Op) -> Pending[Tensor]:
        return Arrived(values.add_(values.new_tensor(self._numbers)) if op is Op.SUM else values)
