"""Life of a worker's process in virtual time: it may hang, be cut off or end, and others find out later.

A process that hangs neither computes nor communicates. One that is cut off computes, but its calls to the
registry wait until the cut has ended. Neither shows a heartbeat. As over processes, silence counts only while
the one who looks can look: a worker that was stopped itself does not take the others for lost.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, TypeVar

from offbeat.core.membership import Registry, Requests
from offbeat.core.pending import Arrived, Pending, block_on
from offbeat.worlds.virtual.outages import ElasticTimes
from offbeat.worlds.virtual.scheduler import Scheduler, Signal

T = TypeVar("T")


class Life:
    """One process of a worker: what the cluster does to it, and what it awaits."""

    def __init__(
        self, rank: int, number: int, scheduler: Scheduler, times: ElasticTimes, inquiries: Inquiries
    ) -> None:
        self.rank = rank
        self.name = f"rank{rank:04}-{number}"  # founders are sorted by it
        self.scheduler = scheduler
        self.times = times
        self.dead = False
        self.gone_at = math.inf  # when the others are told that it has ended
        self.silent_since = math.inf
        self.able_since = scheduler.now  # to look at the heartbeats of others
        self.hung_until = self.cut_until = -math.inf
        self.hung_s = 0.0  # so far
        self.alarm = Alarm(self, inquiries)
        self.begun = 0  # processes that began before it

    @property
    def now(self) -> float:
        return self.scheduler.now

    def clock(self) -> float:
        return self.scheduler.now

    @property
    def blocked_until(self) -> float:
        """The time until which it takes part in no exchange; infinite if it is dead."""
        return math.inf if self.dead else max(self.hung_until, self.cut_until)

    @property
    def is_cut(self) -> bool:
        return self.scheduler.now < self.cut_until

    # --- what happens to it

    def hang(self, seconds: float) -> None:
        """Stop for some seconds."""
        self.hung_until = self.now + seconds
        self.hung_s += seconds
        self._fall_silent(self.hung_until)

    def cut(self, seconds: float) -> None:
        """Reach nobody for some seconds."""
        self.cut_until = self.now + seconds
        self._fall_silent(self.cut_until)

    def end(self, known_after_s: float = 0.0) -> None:
        """End; the others are told after this time, or never."""
        self.dead = True
        self.gone_at = self.now + known_after_s
        self.silent_since = min(self.silent_since, self.now)

    def _fall_silent(self, until_s: float) -> None:
        self.silent_since = self.now
        self.scheduler.at(until_s, self._recover)

    def _recover(self) -> None:
        if not self.dead:
            self.silent_since = math.inf
            self.able_since = self.now
            self.alarm.ring()
            self.scheduler.at(self.now + self.times.silence_s, self.alarm.ring)

    # --- what it sees of others

    def lost_among(self, others: Sequence[Life]) -> list[str]:
        """Return the names of those whom this worker takes for lost."""
        if self.is_cut:
            return []
        now_s, able_s, silence_s = self.scheduler.now, self.able_since, self.times.silence_s
        return [
            other.name
            for other in others
            if (now_s >= other.gone_at or now_s >= max(other.silent_since, able_s) + silence_s)
            and other is not self
        ]

    # --- what it awaits

    def sleep(self, until_s: float) -> Pending[None]:
        """Return a signal that fires at `until_s`, or later by as long as this process hangs meanwhile."""
        return Work(self, until_s)

    def when_connected(self, make: Callable[[], T]) -> Pending[T]:
        """Make a call to the registry now, or when this worker is no longer cut off."""
        return Call(self, make) if self.is_cut else Arrived(make())

    def resume_at(self, time_s: float, resume: Callable[[], None]) -> None:
        """Call `resume` at a time, or when this process no longer hangs; never if it is dead."""

        def attempt() -> None:
            if self.dead:
                return
            if self.now < self.hung_until:
                self.scheduler.at(self.hung_until, attempt)
            else:
                resume()

        self.scheduler.at(time_s, attempt)


class Work(Signal[None]):
    """Computation until a given time; a process that hangs meanwhile ends it later by as much."""

    __slots__ = ("_before_s", "_life", "_until_s")

    def __init__(self, life: Life, until_s: float) -> None:
        self._life = life
        self._until_s = until_s
        self._before_s = life.hung_s

    def __await__(self) -> Generator[Pending[Any], None, None]:
        yield self

    def call_back(self, resume: Callable[[], None]) -> None:
        life, until_s = self._life, self._until_s

        def attempt() -> None:
            due_s = until_s + life.hung_s - self._before_s
            if life.now < due_s:
                life.resume_at(due_s, attempt)
            else:
                resume()

        life.resume_at(until_s, attempt)

    def reason(self) -> str:
        return f"the time {self._until_s} s"


class Call(Signal[T]):
    """A call to the registry, made when its worker is no longer cut off."""

    __slots__ = ("_life", "_make", "_values")

    def __init__(self, life: Life, make: Callable[[], T]) -> None:
        self._life = life
        self._make = make
        self._values: list[T] = []

    def done(self) -> bool:
        return bool(self._values)

    def result(self) -> T:
        return self._values[0]

    def call_back(self, resume: Callable[[], None]) -> None:
        def attempt() -> None:
            self._values.append(self._make())
            resume()

        self._life.resume_at(self._life.cut_until, attempt)

    def reason(self) -> str:
        return f"the store, from which it is cut off until {self._life.cut_until:g} s"


class Alarm(Signal[None]):
    """A wait that ends when anything has happened that the worker may have to look at."""

    __slots__ = ("_asked", "_inquiries", "_life", "_resume", "_rung", "waits_for")

    def __init__(self, life: Life, inquiries: Inquiries) -> None:
        self._life = life
        self._inquiries = inquiries
        self._resume: Callable[[], None] | None = None
        self._rung = False
        self._asked: list[Sequence[str]] = []  # whom it has asked about since the last wait
        self.waits_for = "other workers"

    def __await__(self) -> Generator[Pending[Any], None, None]:
        if not self._rung:
            yield self
        self._rung = False
        self.forget()

    def ask(self, names: Sequence[str]) -> None:
        """Let the next wait end when one of these is found to be lost."""
        if self._inquiries.add(names, self._life):
            self._asked.append(names)

    def forget(self) -> None:
        """Let the next wait end for nobody whom the worker has asked about so far."""
        for names in self._asked:
            self._inquiries.remove(names, self._life)
        self._asked.clear()

    def call_back(self, resume: Callable[[], None]) -> None:
        self._resume = resume

    def ring(self) -> None:
        """End the wait, or the next one."""
        self._rung = True
        if self._resume is not None:
            resume, self._resume = self._resume, None
            self._life.resume_at(self._life.now, resume)

    def reason(self) -> str:
        return self.waits_for


class Inquiries:
    """The workers that wait for news of others: ten thousand ask about one roster, or each about another."""

    def __init__(self) -> None:
        # by the name, if it is one, and else by the names' identity
        self._askers: dict[str | int, tuple[Sequence[str], set[Life]]] = {}

    def add(self, names: Sequence[str], life: Life) -> bool:
        """Add a worker that asks about these; return whether it had not asked about them before."""
        _, askers = self._askers.setdefault(_key(names), (names, set()))
        if life in askers:
            return False
        askers.add(life)
        return True

    def remove(self, names: Sequence[str], life: Life) -> None:
        """Remove a worker that has asked about these."""
        _, askers = self._askers[_key(names)]
        askers.remove(life)
        if not askers:
            del self._askers[_key(names)]

    def about(self, name: str) -> list[Life]:
        """Return those who have asked about this worker, in the order in which they began."""
        found: set[Life] = set()
        for key, (names, askers) in self._askers.items():
            if key == name or (isinstance(key, int) and name in names):
                found |= askers
        return sorted(found, key=lambda life: life.begun)


def _key(names: Sequence[str]) -> str | int:
    return names[0] if len(names) == 1 else id(names)


class Lives:
    """All processes that there were, by name."""

    def __init__(self, scheduler: Scheduler, times: ElasticTimes) -> None:
        self.scheduler = scheduler
        self.times = times
        self.by_name: dict[str, Life] = {}
        self._inquiries = Inquiries()
        self._suspects: dict[str, Life] = {}  # who have ever ended, hung or been cut off
        self._among: dict[int, tuple[Sequence[str], list[Life]]] = {}  # the suspects, by the names' identity
        self._begun: Counter[int] = Counter()  # by rank

    def begin(self, rank: int) -> Life:
        """Begin the life of one more process of a worker."""
        life = Life(rank, self._begun[rank], self.scheduler, self.times, self._inquiries)
        life.begun = len(self.by_name)
        self._begun[rank] += 1
        self.by_name[life.name] = life
        return life

    def announce(self, life: Life) -> None:
        """Let those who ask about this worker look when they find out that it has ended or is silent."""
        if life.dead:
            life.alarm.forget()
        self._suspects[life.name] = life
        self._among.clear()
        known_s = min(life.gone_at, life.silent_since + self.times.silence_s)
        if known_s < math.inf:
            self.scheduler.at(known_s, partial(self._ring_for, life.name))

    def _ring_for(self, name: str) -> None:
        for life in self._inquiries.about(name):
            life.alarm.ring()

    def suspects_among(self, names: Sequence[str]) -> list[Life]:
        """Return those of these workers that may be lost. It is found once for all who look at one roster."""
        if (known := self._among.get(id(names))) is None:
            known = names, [self._suspects[name] for name in names if name in self._suspects]
            if isinstance(names, tuple):  # as those of a roster are; a list is made for one look
                self._among[id(names)] = known
        return known[1]


class VirtualDetector:
    """One worker's opinion on which of the others are lost."""

    def __init__(self, life: Life, lives: Lives, registry: Registry) -> None:
        self._life = life
        self._lives = lives
        self._requests = Requests(registry)
        self._waiting_since = life.now
        self._timer_s = -math.inf  # when it last was set to ring

    def start_waiting(self) -> None:
        self._waiting_since = self._life.now
        self._set_timer()

    def _set_timer(self) -> None:
        """Ring when patience ends. One timer is set at a time, though every exchange starts a wait."""
        if self._timer_s <= self._life.now:
            self._timer_s = self._waiting_since + self._life.times.timeout_s
            self._life.scheduler.at(self._timer_s, self._on_timer)

    def _on_timer(self) -> None:
        if self._life.dead:
            return
        if self.impatient():
            self._life.alarm.ring()
        else:
            self._set_timer()

    def impatient(self) -> bool:
        return self._life.now >= self._waiting_since + self._life.times.timeout_s

    def lost(self, names: Sequence[str]) -> list[str]:
        self._life.alarm.ask(names)
        return self._lost(names)

    def _lost(self, names: Sequence[str]) -> list[str]:
        suspects = self._lives.suspects_among(names)
        return self._life.lost_among(suspects) if suspects else []

    def candidates(self) -> list[str]:
        if self._life.is_cut:
            return []
        names = block_on(self._requests.names())  # calls take no time
        lost = self._lost(names)
        return [name for name in names if name not in lost]
