"""Elastic lanes: operations that are redone, with whoever is left, until all of a roster have them.

An operation keeps its input until its batch is committed. A batch is all that a lane has started when a
result is first awaited; workers start and await in the same order, so it is the same batch on all of them. If
a worker is lost on the way, all workers that are left connect anew and launch every uncommitted operation
again, in order. So each result is the same on all of them, and over exactly the workers of the roster in
which it was committed, and `port.world` changes at the same point of the program everywhere: where that
result is awaited.

A lane is connected where a result of it is first awaited in a roster: many strategies use one lane only, and
connecting another would delay everyone after each death. Operations started before that are launched then.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from offbeat.core.ledger import Ledger
from offbeat.core.membership import ENTRY, Member
from offbeat.core.port import Lane
from offbeat.core.roster import Roster
from offbeat.core.strategy import Strategy
from offbeat.errors import OffbeatError, SettingError

HandOver = Callable[[Roster], Awaitable[bool]]


class Redoable(Protocol):
    """An operation that can be launched again, in another roster."""

    def launch(self) -> None:
        """Start the operation among the current roster; after a failure, again."""
        ...

    async def ended(self) -> bool:
        """Wait until the operation has ended here; return False if it failed, or never will end."""
        ...

    def deliver(self) -> None:
        """Write the result where the strategy reads it. The operation is committed."""
        ...


class RosterNetwork(Protocol):
    """The connections of a roster."""

    async def connect(self, roster: Roster) -> bool:
        """Drop all connections and take over the roster; return False if a worker of it cannot be reached."""
        ...

    def is_open(self, lane: Lane) -> bool:
        """Return whether the lane is connected in the current roster."""
        ...

    async def open(self, lane: Lane) -> bool:
        """Connect the lane, as all of the roster do; return False if a worker of it cannot be reached."""
        ...


class ElasticLanes:
    """The uncommitted operations of one worker, in the order in which they were started."""

    def __init__(self, member: Member, network: RosterNetwork, ledger: Ledger) -> None:
        self.member = member
        self._ledger = ledger
        self.changes = 0  # of the roster, so far
        self._network = network
        self._uncommitted: dict[Lane, list[Redoable]] = {lane: [] for lane in Lane}

    def start(self, operation: Redoable, lane: Lane) -> None:
        """Launch an operation, at once if its lane is connected."""
        self._uncommitted[lane].append(operation)
        if self._network.is_open(lane):
            operation.launch()

    async def commit(self, lane: Lane) -> None:
        """Commit all that the lane has started; redo it for as long as workers are lost."""
        batch = list(self._uncommitted[lane])
        began = self._ledger.clock()
        while not (await self._all_ended(batch, lane) and await self.member.vote(lane.value)):
            await self._reform(f"an exchange of {len(batch)} operations did not end")
            began = self._ledger.lost(began)
        del self._uncommitted[lane][: len(batch)]
        for operation in batch:
            operation.deliver()

    async def _all_ended(self, batch: list[Redoable], lane: Lane) -> bool:
        if batch and not self._network.is_open(lane):
            if not await self._network.open(lane):
                return False
            self._launch_all(lane)
        for operation in batch:
            if not await operation.ended():
                return False
        return True

    def _launch_all(self, lane: Lane) -> None:
        for operation in self._uncommitted[lane]:
            operation.launch()

    async def join(self, receive: HandOver) -> None:
        """Join the first roster, or a later one, whose first member then hands over the state."""
        roster = await self.member.join()
        while not await self._enter(roster, receive):
            roster = await self.member.reform("the entry failed")

    async def admit(self, hand_over: HandOver) -> None:
        """Admit the workers that the last commits have named. Nothing may be in flight."""
        if any(self._uncommitted.values()):
            raise OffbeatError("workers can be admitted only while no operation is in flight")
        roster = await self.member.admit()
        if not await self._enter(roster, hand_over):
            await self._reform("the entry of a new worker failed")

    async def _reform(self, cause: str) -> None:
        """Go on with those who are left, and launch all uncommitted operations of connected lanes again."""
        while True:
            roster = await self.member.reform(cause)
            if await self._enter(roster, _hand_over_nothing):
                break
            cause = "the entry failed"
        for lane in filter(self._network.is_open, Lane):
            self._launch_all(lane)

    async def _enter(self, roster: Roster, hand_over: HandOver) -> bool:
        if not await self._network.connect(roster):
            return False
        if roster.joining and not await hand_over(roster):
            return False
        entered = await self.member.vote(ENTRY)
        self.changes += entered
        self._ledger.rosters += entered
        return entered


async def _hand_over_nothing(roster: Roster) -> bool:
    raise OffbeatError(f"{', '.join(roster.joining)} would join in the middle of an exchange")


def check_elastic(strategy: Strategy[Any], minimum: int) -> None:
    """Raise an error with the reason if the strategy cannot live through the loss of a worker."""
    if minimum < 1:
        raise SettingError(f"minimum={minimum}: at least 1 worker must be left")
    if strategy.server_half() is not None:
        raise SettingError(
            f"elastic=True: {strategy.name} has a parameter server, whose workers may come and go already"
        )
    strategy.check_elastic(minimum)
