"""Events: a heap of what happens when, and coroutines that are resumed in time order.

Ties go by the order in which things were asked for, so that a run repeats to the last bit.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Generic, TypeVar

from offbeat.errors import OffbeatError
from offbeat.ledger import Ledger
from offbeat.port import Pending, expect_pending
from offbeat.worlds.fluid import Transfer
from offbeat.worlds.network import Network

T = TypeVar("T")


class Stuck(OffbeatError):
    """Nothing can happen any more, and somebody still waits; the message says who waits for whom."""


def _over() -> str:
    return "nothing: it has happened"


class Signal(Pending[T], Generic[T]):
    """A result that an event brings. `reason` says what a waiter waits for, if nothing ever comes."""

    __slots__ = ("_happened", "_value", "_waiters", "reason")

    def __init__(self, reason: Callable[[], str]) -> None:
        self.reason = reason
        self._happened = False
        self._waiters: list[Callable[[], None]] = []

    def done(self) -> bool:
        return self._happened

    def result(self) -> T:
        return self._value

    def wait(self) -> None:
        raise OffbeatError("in virtual time nobody can block: await it")

    def happen(self, value: T) -> None:
        self._value = value
        self._happened = True
        self.reason = _over  # what it held on to may hold on to this
        for resume in self._waiters:
            resume()
        self._waiters.clear()

    def call_back(self, resume: Callable[[], None]) -> None:
        self._waiters.append(resume)


class Booked(Signal[T]):
    """What a worker awaits of others: blocking on it is waiting, and is booked as such."""

    __slots__ = ("_events", "_ledger", "_since")

    def __init__(self, events: Events, ledger: Ledger, reason: Callable[[], str]) -> None:
        self.reason = reason
        self._happened = False
        self._waiters = []
        self._events = events
        self._ledger = ledger
        self._since: float | None = None

    def call_back(self, resume: Callable[[], None]) -> None:
        self._since = self._events.now
        super().call_back(resume)

    def happen(self, value: T) -> None:
        if self._since is not None:
            self._ledger.waited(self._events.now - self._since)
        super().happen(value)


def never(reason: str) -> Pending[None]:
    """What does not come."""
    return Signal(lambda: reason)


class Player:
    """A coroutine on the stage, and what it waits for."""

    def __init__(self, events: Events, name: str, play: Coroutine[Any, None, Any]) -> None:
        self.name = name
        self.awaited: Signal[Any] | None = None
        self._events = events
        self._play = play

    def resume(self) -> None:
        self.awaited = None
        try:
            awaited = expect_pending(self._play.send(None))
        except StopIteration:
            self._events.players.remove(self)
            return
        if not isinstance(awaited, Signal):
            raise OffbeatError(f"{self.name} awaits a {type(awaited).__name__} that is not of this world")
        self.awaited = awaited
        awaited.call_back(self._wake)

    def _wake(self) -> None:
        self._events.at(self._events.now, self.resume)


class Events:
    """Virtual time: what happens when, and a network whose transfers make more of it.

    Things that happen at the same time stand in one list: in a lock step of thousands of workers there are
    few different times, so the heap stays small.
    """

    def __init__(self, network: Network) -> None:
        self.now = 0.0
        self.network = network
        self.players: set[Player] = set()
        self._times: list[float] = []  # a heap of the keys of `_actions`
        self._actions: dict[float, deque[Callable[[], None]]] = {}
        self._arrivals: dict[int, Callable[[], None]] = {}

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        actions = self._actions.get(time_s)
        if actions is None:
            actions = self._actions[time_s] = deque()
            heapq.heappush(self._times, time_s)
        actions.append(action)

    def sleep(self, until_s: float) -> Pending[None]:
        signal: Signal[None] = Signal(lambda: f"the time {until_s} s")
        self.at(until_s, partial(signal.happen, None))
        return signal

    def carry(self, transfer: Transfer, arrived: Callable[[], None]) -> None:
        """Put a transfer on the network now; `arrived` is called when it is there."""
        self._arrivals[id(transfer)] = arrived
        self.network.start(self.now, transfer)

    def enter(self, name: str, play: Coroutine[Any, None, Any]) -> None:
        player = Player(self, name, play)
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

    def _stuck(self) -> Stuck:
        waits = sorted(f"{p.name} waits for {p.awaited.reason()}" for p in self.players if p.awaited)
        more = f"; and {len(waits) - 8} more" if len(waits) > 8 else ""
        return Stuck(f"stuck at {self.now:.6g} s: " + "; ".join(waits[:8]) + more)
