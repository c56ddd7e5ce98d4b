"""Port of a worker whose roster may change, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

from torch import Tensor

from offbeat.core.elastic_port import RosterOperation, RosterPort
from offbeat.core.ledger import Ledger
from offbeat.core.membership import ENTRY, Detector, Member, Registry
from offbeat.core.pending import Pending
from offbeat.core.port import Lane, Signature
from offbeat.core.roster import Roster
from offbeat.errors import OffbeatError
from offbeat.worlds.virtual.elastic.exchanges import Exchanges, RosterQueue
from offbeat.worlds.virtual.elastic.life import Life
from offbeat.worlds.virtual.scheduler import Event

T = TypeVar("T")


class VirtualRosterPort(RosterPort):
    """One virtual worker's connection to whoever is in the roster."""

    def __init__(
        self,
        member: Member,
        registry: Registry,
        detector: Detector,
        life: Life,
        exchanges: Exchanges,
        ledger: Ledger,
    ) -> None:
        super().__init__(member, ledger)
        self.life = life
        self.queues: dict[Lane, RosterQueue] = {}
        self._registry = registry
        self._detector = detector
        self._exchanges = exchanges

    async def _connect(self, roster: Roster) -> bool:
        self._disconnect()
        if len(roster.everyone) > 1:
            if not await self.member.meet(ENTRY):
                return False
            if not self.ledger.is_paused:
                await self.life.sleep(self.life.now + self.life.times.connect_s)
        key = f"epoch/{roster.epoch}"
        self.queues = {lane: self._exchanges.queue(key, lane, roster.everyone) for lane in Lane}
        return True

    def _disconnect(self) -> None:
        for queue in self.queues.values():
            queue.abandon()

    def _operation(
        self, signature: Signature, tensors: list[Tensor], value: T, lane: Lane
    ) -> VirtualOperation[T]:
        return VirtualOperation(self, signature, tensors, value, lane)

    async def wait_for(self, result: Event[Any]) -> bool:
        """Wait for the end of an operation; return False if the epoch is given up before."""
        self._detector.start_waiting()
        while not result.done():
            if await self.member.is_broken():
                return result.done()
            await self._registry.pause()
        return True

    async def hand_over(self, roster: Roster, makers: list[Callable[[], Tensor]]) -> list[Tensor] | None:
        names = (roster.members[0], *roster.joining)
        queue = self._exchanges.queue(f"handover/{roster.epoch}", Lane.FRONT, names)
        tensors: list[Tensor] = []
        for make in makers:
            tensor = make()
            signature, handed = Signature("broadcast", "0", (tensor.nbytes,)), [tensor]
            with self.ledger.uncounted_sync():
                received = queue.join(names.index(self.member.name), signature, handed, None)
            if not await self.wait_for(received):
                queue.abandon()
                return None
            tensors.append(tensor.copy_(handed[0]))
        return tensors

    def give_up(self, reason: str) -> None:
        self._disconnect()


class VirtualOperation(RosterOperation[T]):
    """An operation among the roster, whose result leaves what may have to be sent again as it is."""

    _port: VirtualRosterPort

    def __await__(self) -> Generator[Pending[Any], None, T]:
        if not self._delivered:
            life, ledger = self._port.life, self._port.ledger
            began = life.now
            yield from self._port.lanes.commit(self._lane).__await__()
            ledger.waited(life.now - began)
        return self._value

    def fill_once(self, into: Tensor, fill: Callable[[], None]) -> None:
        self._result.fill_once(into, fill)  # all who have committed it have had the same result

    def wait(self) -> None:
        raise OffbeatError("in virtual time a strategy cannot block on a result: await it")

    def _launch(self) -> None:
        self._results = list(self._tensors)  # another roster gets room for others' packets anew
        queue = self._port.queues[self._lane]
        self._result = queue.join(self._port.rank, self._signature, self._results, None)

    async def ended(self) -> bool:
        return await self._port.wait_for(self._result)

    def _deliver(self) -> None:
        if self._packet is None:
            for tensor, result in zip(self._tensors, self._results, strict=True):
                tensor.copy_(result)
        self._results = []
