"""Session of an elastic worker: between two steps it admits newcomers, and adapts to a changed roster."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.core import handover
from offbeat.core.conductor import drive
from offbeat.core.membership import Registry, Roster
from offbeat.core.replica import Replica
from offbeat.core.session import Session
from offbeat.core.strategy import Strategy
from offbeat.errors import OffbeatError
from offbeat.worlds.processes.elastic.groups import close_group
from offbeat.worlds.processes.elastic.port import ElasticPort

S = TypeVar("S")


class ElasticSession(Session[S]):
    """A session whose port has a roster."""

    def __init__(
        self, strategy: Strategy[S], replica: Replica, port: ElasticPort, registry: Registry
    ) -> None:
        super().__init__(strategy, replica, port, port.ledger)
        self.elastic_port = port
        self._registry = registry
        self._joined_at = 0  # the clock of the others when this worker joined
        self._changes = 0  # of the roster, to which the strategy has adapted

    @property
    def clock(self) -> int:
        """Steps of the training so far, with those before this worker joined."""
        return self._joined_at + self.ledger.steps

    async def broadcast(self, root: int = 0) -> None:
        """Join the others: a founder gets worker 0's weights, a newcomer the whole state of a member."""
        try:
            await self.elastic_port.lanes.join(self._receive)
        except BaseException as failed:  # nothing may stay open: the caller may attach again
            self.elastic_port.failures.leave(0, f"{type(failed).__name__}: {failed}")
            self.elastic_port.abandon()
            raise
        joined = self.elastic_port.member.name in self.elastic_port.member.roster.joining
        self._changes = self.elastic_port.lanes.changes
        if joined:
            await self._adapt(newcomer=True)
        else:
            await super().broadcast(root)

    async def step_begins(self) -> None:
        """Admit newcomers and adapt to a changed roster, before the first operation of a step."""
        port, member = self.elastic_port, self.elastic_port.member
        if not member.admitting and port.lanes.changes == self._changes:
            return
        if member.admitting:
            await self.conductor.drain()
        if member.admitting:  # no longer, if a worker was lost meanwhile
            await port.lanes.admit(self._hand_over)
        while port.lanes.changes != self._changes:
            self._changes = port.lanes.changes
            await self._adapt(newcomer=False)

    async def _adapt(self, newcomer: bool) -> None:
        await drive(self.strategy.on_roster_change(self.conductor.state, self.replica, self.port, newcomer))

    # --- handing over the state, from the first member to those who join

    async def _hand_over(self, roster: Roster) -> bool:
        key = f"clock/{roster.epoch}"
        if roster.members[0] != self.elastic_port.member.name:
            return await self._check_clock(key, roster.members[0])
        await self._registry.set(key, str(self.clock))
        blob = await handover.pack(self.conductor, self.clock)
        header = torch.tensor([blob.numel(), handover.checksum(blob)])
        return self._transfer(roster, [lambda: header, lambda: blob]) is not None

    async def _check_clock(self, key: str, first: str) -> bool:
        while (clock := await self._registry.get(key)) is None:
            if await self.elastic_port.member.is_broken():
                return False
            await self._registry.pause()
        if int(clock) != self.clock:
            raise OffbeatError(
                f"this worker is at step {self.clock}, but {first} at step {clock}, when a worker is to be "
                "admitted: call settle(), consensus() and state_dict() on all workers together"
            )
        return True

    async def _receive(self, roster: Roster) -> bool:
        header = torch.zeros(2, dtype=torch.int64)
        received = self._transfer(
            roster, [lambda: header, lambda: torch.empty(int(header[0]), dtype=torch.uint8)]
        )
        if received is None:
            return False
        handover.verify(received[1], int(header[1]))
        self._joined_at = handover.unpack(self.conductor, received[1]) - self.ledger.steps
        return True

    def _transfer(self, roster: Roster, makers: list[Any]) -> list[Tensor] | None:
        """Broadcast tensors from the first member to those who join; None if one of them is lost."""
        groups = self.elastic_port.groups
        names = (roster.members[0], *roster.joining)
        group = groups.make_group(f"handover/{roster.epoch}", names)
        if group is None:
            return None
        options = dist.BroadcastOptions()
        options.rootRank = 0
        tensors: list[Tensor] = []
        try:
            for make in makers:
                tensors.append(make())
                if not groups.wait(group.broadcast([tensors[-1]], options)):
                    return None
            return tensors
        finally:
            close_group(group)
