"""Scheduler of virtual time: a heap of actions, and processes (coroutines) resumed in order of time.

Actions at the same time run in the order in which they were scheduled, so that a run repeats to the last bit.
"""

from __future__ import annotations

import heapq
import math
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from itertools import groupby
from typing import Any, Protocol, TypeVar

from offbeat.core.ledger import Ledger
from offbeat.core.pending import Pending, expect_pending
from offbeat.errors import OffbeatError
from offbeat.worlds.virtual.flow import Ints, Landing, Transfer
from offbeat.worlds.virtual.network import Network, Paths
from offbeat.worlds.virtual.queues import Queues
from offbeat.worlds.virtual.tcp import is_idle

T = TypeVar("T")
Parts = Callable[[list[int]], None]


class Deadlock(OffbeatError):
    """Error: no action is left, but processes still wait. The message names what each process waits for."""


class Clock(Protocol):
    """The time, as one worker sees it and lets it pass."""

    @property
    def now(self) -> float: ...

    def clock(self) -> float:
        """Return the time now."""
        ...

    def sleep(self, until_s: float) -> Pending[None]:
        """Return a signal that fires at `until_s`."""
        ...


class Signal(Pending[T]):
    """An awaitable of virtual time. This base class never fires."""

    __slots__ = ()

    def done(self) -> bool:
        return False

    def result(self) -> T:
        raise OffbeatError(f"no result yet: still waiting for {self.reason()}")

    @abstractmethod
    def reason(self) -> str:
        """Describe what the waiting process waits for, to be shown on deadlock."""

    def call_back(self, resume: Callable[[], None]) -> None:
        """Call `resume` when the signal fires."""

    def wait(self) -> None:
        raise OffbeatError("in virtual time a strategy cannot block on a result: await it")


class Sleep(Signal[None]):
    """A pause until a given time, to be awaited at once: only awaiting it schedules the end."""

    __slots__ = ("_scheduler", "_until_s")

    def __init__(self, scheduler: Scheduler, until_s: float) -> None:
        self._scheduler = scheduler
        self._until_s = until_s

    def __await__(self) -> Generator[Pending[Any], None, None]:
        yield self

    def call_back(self, resume: Callable[[], None]) -> None:
        self._scheduler.at(self._until_s, resume)

    def reason(self) -> str:
        return f"the time {self._until_s} s"


class Never(Signal[None]):
    """An event that never fires; its reason is shown on deadlock."""

    __slots__ = ("_reason",)

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def reason(self) -> str:
        return self._reason


class Event(Signal[T]):
    """An event fired by another process or a transfer; the ledger counts time blocked on it as waiting."""

    __slots__ = ("_fired", "_ledger", "_reason", "_resume", "_scheduler", "_since", "_value")

    def __init__(self, scheduler: Scheduler, ledger: Ledger, reason: Callable[[], str]) -> None:
        self._scheduler = scheduler
        self._ledger = ledger
        self._reason: Callable[[], str] | None = reason
        self._resume: Callable[[], None] | None = None  # set while a worker waits
        self._fired = False

    def done(self) -> bool:
        return self._fired

    def result(self) -> T:
        return self._value

    def call_back(self, resume: Callable[[], None]) -> None:
        self._since = self._scheduler.now
        self._resume = resume

    def succeed(self, value: T) -> None:
        """Fire the event with its value, and resume the process that waits for it."""
        self._value = value
        self._fired = True
        self._reason = None  # the closure may refer to this event: break the reference cycle
        if self._resume is not None:
            now = self._scheduler.now
            self._ledger.waited(now - self._since)
            self._scheduler.at(now, self._resume)

    def reason(self) -> str:
        return "nothing: the event has fired" if self._reason is None else self._reason()


class Process:
    """A coroutine that the scheduler runs, and the signal that it waits for."""

    def __init__(self, scheduler: Scheduler, name: str, coroutine: Coroutine[Any, None, Any]) -> None:
        self.name = name
        self.awaited: Signal[Any] | None = None
        self._scheduler = scheduler
        self._coroutine = coroutine
        self._killed = False

    def resume(self) -> None:
        """Run the coroutine until it awaits the next signal, or ends."""
        if self._killed:
            return
        self.awaited = None
        try:
            awaited = self._coroutine.send(None)
        except StopIteration:
            self._scheduler.processes.remove(self)
            return
        if not isinstance(awaited, Signal):
            foreign = type(expect_pending(awaited)).__name__
            raise OffbeatError(f"{self.name} awaits a {foreign}, which does not belong to virtual time")
        self.awaited = awaited
        awaited.call_back(self.resume)

    def kill(self) -> None:
        """End the process where it is, even before it has run at all."""
        self._killed = True
        self._scheduler.processes.discard(self)
        self._coroutine.close()


class Scheduler:
    """Clock, heap of actions, processes and network of one simulation.

    Actions at the same time are kept in one list: when thousands of workers run in lock step there are few
    different times, so the heap stays small.
    """

    def __init__(self, network: Network) -> None:
        self.now = 0.0
        self.network = network
        self.queues = Queues(network.bytes_per_s, network.queue_s) if network.queue_s else None
        self._traffic = self.queues or network
        self.processes: set[Process] = set()
        self._times: list[float] = []  # a heap of the keys of `_actions`
        self._actions: dict[float, deque[Callable[[], None]]] = {}
        self._arrivals: dict[int, Callable[[], None]] = {}
        self._used_s: dict[tuple[int, int], float] = {}  # when a long message last left on each path
        self._arrives_s: dict[tuple[int, int], float] = {}  # when it arrives
        for at_s, links, bits_per_s in network.rate_changes:
            self.at(at_s, partial(self._change_rate, links, bits_per_s))

    def clock(self) -> float:
        return self.now

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Call `action` at `time_s`, after all actions already scheduled for that time."""
        actions = self._actions.get(time_s)
        if actions is None:
            actions = self._actions[time_s] = deque()
            heapq.heappush(self._times, time_s)
        actions.append(action)

    def sleep(self, until_s: float) -> Pending[None]:
        """Return a signal that fires at `until_s`."""
        return Sleep(self, until_s)

    def transfer(self, transfer: Transfer, arrived: Callable[[], None]) -> None:
        """Start a transfer on the network now; call `arrived` when it has arrived."""
        self._arrivals[id(transfer)] = arrived
        self._traffic.start(self.now, transfer)

    def send(self, paths: Paths, sizes: tuple[int, ...], left: Parts, arrived: Parts) -> None:
        """Send messages from node to other node that leave together, now.

        Those whose bytes leave their links together are one event: `left` is called with their numbers, and
        `arrived` a latency later. Where links have queues, `left` is called when their bytes have left the
        sender, and `arrived` a latency after they have left their links.
        """
        messages = self.network.messages(paths, sizes)
        latency_s = messages.latency_s
        slow = not messages.together and any(messages.slow_start_s)
        if slow:
            latency_s = [
                latency + lost_s * is_idle(self._used_s.get(path, -math.inf), self.now, rtt_s)
                for path, latency, lost_s, rtt_s in zip(
                    paths, latency_s, messages.slow_start_s, messages.rtt_s, strict=True
                )
            ]

        def landed(parts: list[int]) -> None:
            if messages.together and not self._arrives_s:
                self.at(self.now + latency_s[0], partial(arrived, parts))
            elif not slow and not self._arrives_s:
                for latency, alike in groupby(parts, key=latency_s.__getitem__):
                    self.at(self.now + latency, partial(arrived, list(alike)))
            else:  # nothing overtakes a slow message on its path
                times = {p: max(self.now + latency_s[p], self._arrives_s.get(paths[p], 0.0)) for p in parts}
                for time_s, alike in groupby(parts, key=times.__getitem__):
                    self.at(time_s, partial(arrived, list(alike)))
                if slow:
                    self._used_s.update((paths[part], self.now) for part in parts)
                    self._arrives_s.update((paths[part], times[part]) for part in parts)

        def landed_and_left(parts: list[int]) -> None:
            landed(parts)
            left(parts)

        if self.queues is not None:
            self.queues.send(self.now, messages.links, sizes, left, landed)
        else:
            self.network.start_all(self.now, messages.bundle, landed_and_left)

    def _change_rate(self, links: Ints, bits_per_s: float) -> None:
        self.network.change_rate(self.now, links, bits_per_s)
        if self.queues is not None:
            self.queues.set_rate(self.now, links.tolist(), float(self.network.bytes_per_s[links[0]]))

    def cancel(self, transfer: Transfer) -> None:
        """End a transfer that has not arrived; one that has arrived is not changed."""
        if self._arrivals.pop(id(transfer), None) is not None:
            self._traffic.cancel(self.now, transfer)

    def spawn(self, name: str, coroutine: Coroutine[Any, None, Any]) -> Process:
        """Start a process, at the current time; `name` is shown on deadlock."""
        process = self._add(name, coroutine)
        self.at(self.now, process.resume)
        return process

    def start(self, name: str, coroutine: Coroutine[Any, None, Any]) -> None:
        """Start a process, and run it to its first signal before this method returns."""
        self._add(name, coroutine).resume()

    def _add(self, name: str, coroutine: Coroutine[Any, None, Any]) -> Process:
        process = Process(self, name, coroutine)
        self.processes.add(process)
        return process

    def run(self) -> None:
        """Run until every process has ended."""
        while self.processes:
            transfer_at = self._traffic.next_event()
            if self._times and (transfer_at is None or self._times[0] <= transfer_at):
                self._run_next_actions()
            elif transfer_at is not None:
                self.now = transfer_at
                for arrived in self._traffic.advance(transfer_at):
                    if isinstance(arrived, Landing):
                        arrived.landed(arrived.parts)
                    else:
                        self._arrivals.pop(id(arrived))()
            else:
                raise self._deadlock()

    def _run_next_actions(self) -> None:
        """Run all actions at the next time, and those that they schedule for the same time."""
        self.now = self._times[0]
        actions = self._actions[self.now]
        while actions:
            actions.popleft()()
        heapq.heappop(self._times)
        del self._actions[self.now]

    def _deadlock(self) -> Deadlock:
        waits = sorted(f"{p.name} waits for {p.awaited.reason()}" for p in self.processes if p.awaited)
        more = f"; and {len(waits) - 8} more" if len(waits) > 8 else ""
        return Deadlock(f"stuck at {self.now:.6g} s: " + "; ".join(waits[:8]) + more)
