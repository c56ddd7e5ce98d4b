"""Workers whose membership runs in memory, under any schedule: one call of the registry after another.

A worker may be killed between any two calls, hang, resume, be suspected though it lives, or see an exchange
fail for no reason. Tensors are stood in for by names: a result is who took part in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Generic, NamedTuple, TypeVar

from offbeat.core.elastic import ElasticLanes
from offbeat.core.ledger import Ledger
from offbeat.core.membership import Member, Requests
from offbeat.core.pending import Pending, block_on
from offbeat.core.port import Lane
from offbeat.core.roster import Roster
from offbeat.errors import RankDropped, RankLost

T = TypeVar("T")
MOST_CALLS = 60_000  # a schedule that needs more makes no progress


class Call(Pending[T], Generic[T]):
    """A call of the registry, made when the schedule lets its worker go on."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: list[T] = []

    def done(self) -> bool:
        return bool(self._values)

    def result(self) -> T:
        return self._values[0]

    def wait(self) -> None:
        self._values.append(self._make())


class MemoryRegistry:
    """A registry in memory, for all workers of one schedule."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.counts: dict[str, int] = {}

    def get(self, key: str) -> Call[str | None]:
        return Call(lambda: self.texts.get(key))

    def set(self, key: str, value: str) -> Call[None]:
        return Call(lambda: self.texts.update({key: value}))

    def set_once(self, key: str, value: str) -> Call[str]:
        return Call(lambda: self.texts.setdefault(key, value))

    def add(self, key: str, amount: int) -> Call[int]:
        def change() -> int:
            self.counts[key] = self.counts.get(key, 0) + amount
            return self.counts[key]

        return Call(change)

    def delete(self, key: str) -> Call[None]:
        return Call(lambda: self.texts.pop(key) and None)

    def pause(self) -> Call[None]:
        return Call(lambda: None)


class Committed(NamedTuple):
    """A result of an exchange, as one worker has it."""

    exchange: str
    epoch: int
    roster: tuple[str, ...]
    parts: tuple[str, ...]  # what each of the roster sent


@dataclass
class Fault:
    """What happens before call number `at` of a schedule."""

    at: int
    kind: str  # kill, hang, resume, suspect, trust, join, break or tire
    who: int


@dataclass
class Stage:
    """All workers of a schedule, the registry, and what is wrong with them."""

    rounds: int
    founders: int
    minimum: int
    registry: MemoryRegistry = field(default_factory=MemoryRegistry)
    workers: list[SimulatedWorker] = field(default_factory=list)
    dead: set[str] = field(default_factory=set)
    hung: set[str] = field(default_factory=set)
    suspected: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)  # whose next exchange fails
    sent: dict[tuple[int, str, int], dict[str, str]] = field(default_factory=dict)
    connected: dict[int, set[str]] = field(default_factory=dict)
    calm: bool = False  # no more faults: opinions are right from now on

    def add_worker(self) -> None:
        self.workers.append(SimulatedWorker(f"w{len(self.workers)}", self))

    def apply(self, fault: Fault) -> None:
        if fault.kind == "join":
            self.add_worker()
            return
        name = self.workers[fault.who % len(self.workers)].name
        changes: dict[str, Callable[[], Any]] = {
            "kill": lambda: self.dead.add(name),
            "hang": lambda: self.hung.add(name),
            "resume": lambda: self.hung.discard(name),
            "suspect": lambda: self.suspected.add(name),
            "trust": lambda: self.suspected.discard(name),
            "break": lambda: self.broken.add(name),
            "tire": lambda: [worker.lose_patience() for worker in self.workers],
        }
        changes[fault.kind]()

    def calm_down(self) -> None:
        self.calm = True
        self.hung.clear()
        self.broken.clear()
        self.suspected.clear()

    def is_lost(self, name: str) -> bool:
        ended = next((w.ended for w in self.workers if w.name == name), True)
        return name in self.suspected or ended or name in self.dead

    def running(self) -> list[SimulatedWorker]:
        gone = self.dead | self.hung
        return [w for w in self.workers if not w.ended and w.name not in gone]

    def run(self, seed: int, faults: Sequence[Fault] = (), calm_at: int = 1000) -> None:
        """Run all workers to their ends, in an order that the seed draws."""
        draw = Random(seed)
        coming = sorted(faults, key=lambda fault: fault.at)
        for calls in range(MOST_CALLS):
            while coming and coming[0].at <= calls:
                self.apply(coming.pop(0))
            if calls == calm_at or (calls > calm_at and not coming and not self.calm):
                self.calm_down()
            if not (running := self.running()):
                if not coming and self.calm:
                    for worker in self.workers:
                        worker.close()
                    return
                continue
            draw.choice(running).go_on()
        stuck = {w.name: w.member.roster for w in self.running()}
        raise AssertionError(f"no progress: {stuck}")


class SimulatedWorker:
    """A worker that makes rounds of exchanges, on both lanes, and hands over its log to newcomers."""

    def __init__(self, name: str, stage: Stage) -> None:
        self.name = name
        self.stage = stage
        self.log: list[Committed] = []
        self.clock = 0
        self.ended = False
        self.error: RankLost | None = None
        self.joined_at = 0
        self.member = Member(name, stage.registry, self, stage.minimum, stage.founders)
        self.lanes = ElasticLanes(self.member, self, Ledger(0, lambda: 0.0))
        self.numbers: dict[str, int] = {}
        self.opened: set[Lane] = set()
        self._patient = True
        self._requests = Requests(stage.registry)
        self._code: Coroutine[Any, None, None] = self._train()
        self._awaited: Pending[Any] | None = None

    def go_on(self) -> None:
        """Make the call that this worker waits for, and run it to its next one."""
        if self._awaited is not None:
            self._awaited.wait()
        try:
            self._awaited = self._code.send(None)
        except StopIteration:
            self.ended = True
        except RankDropped as dropped:  # come back under a new name, as a restarted process does
            self.ended, self.error = True, dropped
            self.stage.add_worker()
        except RankLost as lost:
            self.ended, self.error = True, lost

    def close(self) -> None:
        """Forget the rest of a killed worker's program."""
        self._code.close()

    async def _train(self) -> None:
        await self.lanes.join(self._receive)
        self.joined_at = self.clock
        while self.clock < self.stage.rounds:
            if self.member.admitting:
                await self._drain()
            if self.member.admitting:  # no longer, if a worker was lost meanwhile
                await self.lanes.admit(self._hand_over)
            await self.stage.registry.pause()
            behind = self.clock % 2 == 0
            self.lanes.start(SimulatedExchange(f"{self.clock}a", Lane.FRONT, self), Lane.FRONT)
            self.lanes.start(SimulatedExchange(f"{self.clock}b", Lane.FRONT, self), Lane.FRONT)
            if behind:
                self.lanes.start(SimulatedExchange(f"{self.clock}c", Lane.BACK, self), Lane.BACK)
            await self.lanes.commit(Lane.FRONT)
            if not behind:
                await self.lanes.commit(Lane.BACK)
            self.clock += 1
        await self._drain()

    async def _drain(self) -> None:
        if self.clock % 2:
            await self.lanes.commit(Lane.BACK)
            # Committed already: the coming round has nothing in flight to wait for, and votes all the same.

    # --- the state: a log of results

    async def _hand_over(self, roster: Roster) -> bool:
        if roster.members[0] == self.name:
            key = f"state/{roster.epoch}"
            await self.stage.registry.set(key, json.dumps([self.clock, self.log]))
        return True

    async def _receive(self, roster: Roster) -> bool:
        while (text := await self.stage.registry.get(f"state/{roster.epoch}")) is None:
            if await self.member.is_broken():
                return False
            await self.stage.registry.pause()
        self.clock, log = json.loads(text)
        self.log = [Committed(name, epoch, tuple(who), tuple(parts)) for name, epoch, who, parts in log]
        return True

    # --- the network

    async def connect(self, roster: Roster) -> bool:
        self.numbers = {}
        self.opened = set()
        self.stage.connected.setdefault(roster.epoch, set()).add(self.name)
        while not self.stage.connected[roster.epoch] >= set(roster.everyone):
            if await self.member.is_broken():
                return False
            await self.stage.registry.pause()
        return True

    def is_open(self, lane: Lane) -> bool:
        return lane in self.opened

    async def open(self, lane: Lane) -> bool:
        if not await self.member.meet(lane.value):
            return False
        self.opened.add(lane)
        return True

    # --- the detector

    def start_waiting(self) -> None:
        self._patient = True

    def lose_patience(self) -> None:
        self._patient = False

    def lost(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name != self.name and self.stage.is_lost(name)]

    def impatient(self) -> bool:
        if "roster/1" not in self.stage.registry.texts:
            return self.stage.calm
        return not self._patient and bool(
            self.member.roster.epoch
        )  # those who ask wait for as long as it takes

    def candidates(self) -> list[str]:
        code: Any = self._requests.names()
        names = block_on(code)
        return [name for name in names if name not in self.lost(names)]


class SimulatedExchange:
    """An exchange that ends when all of the roster have launched it."""

    def __init__(self, name: str, lane: Lane, worker: SimulatedWorker) -> None:
        self._name = name
        self._lane = lane
        self._worker = worker
        self._parts: dict[str, str] = {}
        self._epoch = 0

    def launch(self) -> None:
        worker, member = self._worker, self._worker.member
        number = worker.numbers[self._lane.value] = worker.numbers.get(self._lane.value, 0) + 1
        self._epoch = member.roster.epoch
        place = (member.roster.epoch, self._lane.value, number)
        self._parts = worker.stage.sent.setdefault(place, {})
        self._parts[worker.name] = self._name

    async def ended(self) -> bool:
        worker = self._worker
        while len(self._parts) < worker.member.world:
            if await worker.member.is_broken():
                return False
            await worker.stage.registry.pause()
        if worker.name in worker.stage.broken:
            worker.stage.broken.discard(worker.name)
            return False
        return True

    def deliver(self) -> None:
        member = self._worker.member
        roster = member.roster.everyone
        assert self._epoch == member.roster.epoch, f"{self._name} was not launched in this epoch"
        parts = tuple(self._parts[name] for name in roster)
        self._worker.log.append(Committed(self._name, member.roster.epoch, roster, parts))
