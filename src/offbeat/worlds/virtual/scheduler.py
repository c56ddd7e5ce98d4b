"""Events: a heap of what happens when, and coroutines that are resumed in time order.

Ties go by the order in which things were asked for, so that a run repeats to the last bit.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

from offbeat.core.ledger import Ledger
from offbeat.core.pending import Pending, expect_pending
from offbeat.errors import OffbeatError
from offbeat.worlds.virtual.flow import Transfer
from offbeat.worlds.virtual.network import Network

T = TypeVar("T")


class Deadlock(OffbeatError):
    """Nothing can happen any more, and somebody still waits; the message says who waits for whom."""


class Signal(Pending[T]):
    """What a coroutine of this world awaits. By itself it never comes."""

    __slots__ = ()

    def done(self) -> bool:
        return False

    def result(self) -> T:
        raise OffbeatError(f"not here yet: {self.reason()}")

    @abstractmethod
    def reason(self) -> str:
        """What its waiter waits for."""

    def call_back(self, resume: Callable[[], None]) -> None:
        """Call `resume` when it comes."""

    def wait(self) -> None:
        raise OffbeatError("in virtual time nobody can block: await it")


class Sleep(Signal[None]):
    """Time that passes. To be awaited at once: it makes no event but that the sleeper goes on."""

    __slots__ = ("_events", "_until_s")

    def __init__(self, events: Scheduler, until_s: float) -> None:
        self._events = events
        self._until_s = until_s

    def __await__(self) -> Generator[Pending[Any], None, None]:
        yield self

    def call_back(self, resume: Callable[[], None]) -> None:
        self._events.at(self._until_s, resume)

    def reason(self) -> str:
        return f"the time {self._until_s} s"


class Never(Signal[None]):
    """What does not come."""

    __slots__ = ("_reason",)

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def reason(self) -> str:
        return self._reason


class Event(Signal[T]):
    """What a worker awaits of others: blocking on it is waiting, and is booked as such."""

    __slots__ = ("_events", "_happened", "_ledger", "_reason", "_resume", "_since", "_value")

    def __init__(self, events: Scheduler, ledger: Ledger, reason: Callable[[], str]) -> None:
        self._events = events
        self._ledger = ledger
        self._reason: Callable[[], str] | None = reason
        self._resume: Callable[[], None] | None = None  # of the worker, if it waits
        self._happened = False

    def done(self) -> bool:
        return self._happened

    def result(self) -> T:
        return self._value

    def call_back(self, resume: Callable[[], None]) -> None:
        self._since = self._events.now
        self._resume = resume

    def succeed(self, value: T) -> None:
        self._value = value
        self._happened = True
        self._reason = None  # what it holds on to may hold on to this
        if self._resume is not None:
            now = self._events.now
            self._ledger.waited(now - self._since)
            self._events.at(now, self._resume)

    def reason(self) -> str:
        return "nothing: it has happened" if self._reason is None else self._reason()


class Process:
    """A coroutine on the stage, and what it waits for."""

    def __init__(self, events: Scheduler, name: str, play: Coroutine[Any, None, Any]) -> None:
        self.name = name
        self.awaited: Signal[Any] | None = None
        self._events = events
        self._play = play

    def resume(self) -> None:
        self.awaited = None
        try:
            awaited = self._play.send(None)
        except StopIteration:
            self._events.players.remove(self)
            return
        if not isinstance(awaited, Signal):
            strange = type(expect_pending(awaited)).__name__
            raise OffbeatError(f"{self.name} awaits a {strange} that is not of this world")
        self.awaited = awaited
        awaited.call_back(self.resume)


class Scheduler:
    """Virtual time: what happens when, and a network whose transfers make more of it.

    Things that happen at the same time stand in one list: in a lock step of thousands of workers there are
    few different times, so the heap stays small.
    """

    def __init__(self, network: Network) -> None:
        self.now = 0.0
        self.network = network
        self.players: set[Process] = set()
        self._times: list[float] = []  # a heap of the keys of `_actions`
        self._actions: dict[float, deque[Callable[[], None]]] = {}
        self._arrivals: dict[int, Callable[[], None]] = {}

    def clock(self) -> float:
        return self.now

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        actions = self._actions.get(time_s)
        if actions is None:
            actions = self._actions[time_s] = deque()
            heapq.heappush(self._times, time_s)
        actions.append(action)

    def sleep(self, until_s: float) -> Pending[None]:
        return Sleep(self, until_s)

    def transfer(self, transfer: Transfer, arrived: Callable[[], None]) -> None:
        """Put a transfer on the network now; `arrived` is called when it is there."""
        self._arrivals[id(transfer)] = arrived
        self.network.start(self.now, transfer)

    def spawn(self, name: str, play: Coroutine[Any, None, Any]) -> None:
        player = Process(self, name, play)
        self.players.add(player)
        self.at(self.now, player.resume)

    def run(self) -> None:
        """Until every coroutine has ended."""
        while self.players:
            transfer_at = self.network.next_event()
            if self._times and (transfer_at is None or self._times[0] <= transfer_at):
                self._act()
            elif transfer_at is not None:
                self.now = transfer_at
                for transfer in self.network.advance(transfer_at):
                    self._arrivals.pop(id(transfer))()
            else:
                raise self._stuck()

    def _act(self) -> None:
        """Do all that happens at the next time, and what it brings about at once."""
        self.now = self._times[0]
        actions = self._actions[self.now]
        while actions:
            actions.popleft()()
        heapq.heappop(self._times)
        del self._actions[self.now]

    def _stuck(self) -> Deadlock:
        waits = sorted(f"{p.name} waits for {p.awaited.reason()}" for p in self.players if p.awaited)
        more = f"; and {len(waits) - 8} more" if len(waits) > 8 else ""
        return Deadlock(f"stuck at {self.now:.6g} s: " + "; ".join(waits[:8]) + more)
