"""Session of an elastic worker: between two steps it admits newcomers, and adapts to a changed roster."""

from __future__ import annotations

from typing import TypeVar

import torch

from offbeat.core import handover
from offbeat.core.conductor import drive
from offbeat.core.elastic_port import RosterPort
from offbeat.core.membership import Registry, read_number
from offbeat.core.replica import Replica
from offbeat.core.roster import Roster
from offbeat.core.session import Session
from offbeat.core.strategy import Strategy
from offbeat.errors import OffbeatError

S = TypeVar("S")


class ElasticSession(Session[S]):
    """A session whose port has a roster."""

    def __init__(self, strategy: Strategy[S], replica: Replica, port: RosterPort, registry: Registry) -> None:
        super().__init__(strategy, replica, port, port.ledger)
        self.roster_port = port
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
            await self.roster_port.lanes.join(self._receive)
        except BaseException as failed:  # nothing may stay open: the caller may attach again
            self.roster_port.give_up(f"{type(failed).__name__}: {failed}")
            raise
        joined = self.roster_port.member.name in self.roster_port.member.roster.joining
        self._changes = self.roster_port.lanes.changes
        if joined:
            await self._adapt(newcomer=True)
        else:
            await super().broadcast(root)

    async def step_begins(self) -> None:
        """Admit newcomers and adapt to a changed roster, before the first operation of a step."""
        port, member = self.roster_port, self.roster_port.member
        if not member.admitting and port.lanes.changes == self._changes:
            return
        if member.admitting:
            await self.conductor.drain()
        if member.admitting:  # no longer, if a worker was lost meanwhile
            began = self.ledger.clock()
            await port.lanes.admit(self._hand_over)
            self.ledger.waited(self.ledger.clock() - began)
        while port.lanes.changes != self._changes:
            self._changes = port.lanes.changes
            await self._adapt(newcomer=False)

    async def _adapt(self, newcomer: bool) -> None:
        await drive(self.strategy.on_roster_change(self.conductor.state, self.replica, self.port, newcomer))

    # --- handing over the state, from the first member to those who join

    async def _hand_over(self, roster: Roster) -> bool:
        key = f"clock/{roster.epoch}"
        if roster.members[0] != self.roster_port.member.name:
            return await self._check_clock(key, roster.members[0])
        await self._registry.set(key, str(self.clock))
        blob = await handover.pack(self.conductor, self.clock)
        header = torch.tensor([blob.numel(), handover.checksum(blob)])
        return await self.roster_port.hand_over(roster, [lambda: header, lambda: blob]) is not None

    async def _check_clock(self, key: str, first: str) -> bool:
        while (clock := await self._registry.get(key)) is None:
            if await self.roster_port.member.is_broken():
                return False
            await self._registry.pause()
        if read_number(clock) != self.clock:
            raise OffbeatError(
                f"this worker is at step {self.clock}, but {first} at step {clock}, when a worker is to be "
                "admitted: call settle(), consensus() and state_dict() on all workers together"
            )
        return True

    async def _receive(self, roster: Roster) -> bool:
        header = torch.zeros(2, dtype=torch.int64)
        received = await self.roster_port.hand_over(
            roster, [lambda: header, lambda: torch.empty(int(header[0]), dtype=torch.uint8)]
        )
        if received is None:
            return False
        handover.verify(received[1], int(header[1]))
        self._joined_at = handover.unpack(self.conductor, received[1]) - self.ledger.steps
        return True
