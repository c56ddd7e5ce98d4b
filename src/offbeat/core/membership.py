"""Membership: which workers train together, when workers may die, hang, be cut off, return or be new.

An *epoch* is a roster of workers, written once into a registry that no worker's death ends. Within an epoch
the workers commit *batches* of operations, each on all of them or on none:

    vote      each worker counts itself when its own part of a batch has ended
    decide    whoever sees that all have voted writes "commit"; a worker that has lost another writes "abort".
              Only the first of these is stored, and everyone goes by it: a worker that dies just after its
              vote cannot split the others
    reform    after an abort, or when an operation failed: the epoch is closed, and those who are left write
              the roster of the next one. A worker that is missing in it was dropped, and can commit nothing
    admit     a worker that asks to join is named in a commit, so all members learn of it at the same point
              of their programs; there they write a roster with it, and hand over the state

A worker takes part in an epoch once all of its roster have committed the epoch's *entry*: a newcomer that did
not get the state is no member.

Nothing here does I/O, reads a clock or starts a thread. The registry and the detector of lost workers are
passed in: over processes a TCP store and heartbeats, in tests memory and any schedule of faults. No suspicion
of the detector, however wrong, lets two rosters commit the same batch.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Protocol

from offbeat.core.pending import Pending
from offbeat.core.roster import KEPT, Roster, foreign_text, read_json
from offbeat.errors import RankDropped, RankLost

ENTRY = "entry"  # the batch that all of a roster commit first
COMMIT, ABORT = "commit", "abort"
BEAT_S = 0.25  # from one heartbeat to the next, and from one look at those of others to the next
NEWS_PER_BEAT = 5  # looks for news of deaths and requests to join
NEWS_S = BEAT_S / NEWS_PER_BEAT
SILENT_LOOKS = 20  # without a heartbeat until a worker is lost: 5 seconds
REFORMS = 8  # in a row without a committed exchange, before workers give up
MOST_NAMED = 8  # workers in an error


class NotAdmitted(RankLost):
    """The workers that train did not admit this one in time: it may ask again, as a new process."""


class Registry(Protocol):
    """Shared texts and counters. Each call is atomic, and none waits for another worker."""

    def get(self, key: str) -> Pending[str | None]:
        """Read a text; None if there is none."""
        ...

    def set(self, key: str, value: str) -> Pending[None]:
        """Write a text."""
        ...

    def set_once(self, key: str, value: str) -> Pending[str]:
        """Write a text unless there is one already; return the text that is there now."""
        ...

    def add(self, key: str, amount: int) -> Pending[int]:
        """Add to a counter, which starts at 0; return its new value."""
        ...

    def delete(self, key: str) -> Pending[None]:
        """Delete a text."""
        ...

    def pause(self) -> Pending[None]:
        """Let a moment pass before the next look."""
        ...


class Detector(Protocol):
    """Opinion on which workers are lost. It may be wrong, but finds a worker that is gone some day."""

    def start_waiting(self) -> None:
        """Start to wait for other workers."""
        ...

    def lost(self, names: Sequence[str]) -> list[str]:
        """Return those of these workers that died, left or are silent; never this worker itself."""
        ...

    def impatient(self) -> bool:
        """Return whether this worker has waited for too long."""
        ...

    def candidates(self) -> list[str]:
        """Return the workers that ask to join, and are not lost."""
        ...


class Member:
    """One worker's part in the membership."""

    def __init__(
        self, name: str, registry: Registry, detector: Detector, minimum: int = 1, founders: int = 1
    ) -> None:
        self.name = name
        self.minimum = minimum
        self.founders = founders  # workers that make up the first roster
        self.roster = Roster(0, ())
        self.entered = False
        self.admitting: tuple[str, ...] = ()  # named in a commit of this epoch
        self._registry = registry
        self._requests = Requests(registry)
        self._detector = detector
        self._batches: Counter[str] = Counter()  # committed in this epoch, by lane
        self._request = ""  # the key of this worker's request to join
        self._reforms = 0  # since the last committed exchange

    @property
    def rank(self) -> int:
        return self.roster.ranks[self.name]

    @property
    def world(self) -> int:
        return len(self.roster.everyone)

    @property
    def is_joining(self) -> bool:
        """True while this worker is in a roster, but has not the state yet."""
        return not self.entered and self.name in self.roster.joining

    # --- joining

    async def join(self) -> Roster:
        """Ask to join, and wait for a roster with this worker: the first one, or a later one."""
        await self._ask()
        self._detector.start_waiting()
        while True:
            latest = await self._latest()
            if latest is None:
                await self._found()
            elif latest.stopped:
                raise RankLost(latest.stopped)
            elif self.name in latest.ranks and latest.epoch > self.roster.epoch:
                return await self._take(latest)
            elif len(self._detector.lost(latest.members)) == len(latest.members):
                raise RankLost(
                    "all workers of the last roster have ended or are gone; no one can hand over the state: "
                    "start the store, too, and all workers again, from a checkpoint"
                )
            elif self._detector.impatient():
                raise NotAdmitted(
                    f"asked {_some_of(latest.members)} to join, but none of them admitted this worker: "
                    "workers are admitted between two steps, after an exchange"
                )
            await self._registry.pause()

    async def _ask(self) -> None:
        if not self._request:
            self._request = f"request/{await self._registry.add('requests', 1)}"
            await self._registry.set(self._request, self.name)

    async def _found(self) -> None:
        """Write the first roster once enough workers are there; after a while, with those that are there."""
        if await self._requests.count() < self.founders and not self._detector.impatient():
            return
        names = await self._requests.names()
        lost = self._detector.lost(names)
        there = [name for name in names if name not in lost]
        enough = len(there) >= self.founders
        if enough or (self._detector.impatient() and len(there) >= self.minimum):
            first = Roster(1, tuple(sorted(there[: self.founders])))
            await self._registry.set_once("roster/1", first.to_text())
        elif self._detector.impatient():
            raise RankLost(
                f"{len(there)} of {self.founders} workers came ({', '.join(there)}); at least {self.minimum} "
                "are needed to start"
            )

    async def _latest(self) -> Roster | None:
        """Return the roster of the latest epoch."""
        epoch = read_number(await self._registry.get("epoch") or "0")  # a hint, from which to look on
        text = await self._registry.get(f"roster/{epoch}") if epoch else None
        while (following := await self._registry.get(f"roster/{epoch + 1}")) is not None:
            epoch, text = epoch + 1, following
        return None if text is None else Roster.from_text(text)

    async def _take(self, roster: Roster) -> Roster:
        self.roster, self.entered, self.admitting = roster, False, ()
        self._batches.clear()
        await self._registry.set("epoch", str(roster.epoch))
        return roster

    async def meet(self, place: str) -> bool:
        """Wait until all of the roster have called this; return False if the epoch is given up before.

        `place` tells apart the meetings of an epoch.
        """
        key = f"here/{self.roster.epoch}/{place}"
        await self._registry.add(key, 1)
        self._detector.start_waiting()
        while await self._registry.add(key, 0) < self.world:
            if await self.is_broken():
                return False
            await self._registry.pause()
        return True

    # --- committing

    async def vote(self, lane: str) -> bool:
        """Vote for the lane's next batch, whose operations have ended here; return if it is committed."""
        batch = self._batches[lane] + 1
        votes, key = f"votes/{self.roster.epoch}/{lane}", f"decision/{self.roster.epoch}/{lane}"
        count = await self._registry.add(votes, 1)
        if count == batch * self.world:
            asking = [] if lane == ENTRY else self._detector.candidates()
            asking = [name for name in asking if name not in self.roster.ranks]
            decision = await self._registry.set_once(f"{key}/{batch}", json.dumps([COMMIT, asking]))
            if batch > 1:  # all have voted for this batch, so all have read the decision before it
                await self._registry.delete(f"{key}/{batch - 1}")
        else:
            decision = await self._await_decision(f"{key}/{batch}", votes, batch)
        verdict, admitted = read_decision(decision)
        if verdict == ABORT:
            return False
        self._batches[lane] += 1
        if lane != ENTRY:
            self._reforms = 0
        else:
            self.entered = True
            await self._registry.set(self._request, "")
        self.admitting = self.admitting or admitted
        return True

    async def _await_decision(self, key: str, votes: str, batch: int) -> str:
        self._detector.start_waiting()
        while (decision := await self._registry.get(key)) is None:
            if await self.is_broken():
                complete = await self._registry.add(votes, 0) == batch * self.world
                verdict = COMMIT if complete else ABORT
                return await self._registry.set_once(key, json.dumps([verdict, []]))
            await self._registry.pause()
        return decision

    async def is_broken(self) -> bool:
        """Return whether to give this epoch up: it was closed, or a worker of its roster is lost or stuck."""
        if self._detector.lost(self.roster.everyone) or self._detector.impatient():
            return True
        return await self._registry.get(f"closed/{self.roster.epoch}") is not None

    # --- the next epoch

    async def admit(self) -> Roster:
        """Write the roster with the workers that a commit has named; all members call this together."""
        following = self.roster.text_with(self.admitting)
        text = await self._registry.set_once(f"roster/{self.roster.epoch + 1}", following)
        return await self._follow(Roster.from_text(text))

    async def reform(self, cause: str) -> Roster:
        """Close this epoch, and wait for the roster of those who are left.

        A worker whose own entry failed has no state, and asks to join again.
        """
        epoch = self.roster.epoch
        first = await self._registry.set_once(f"closed/{epoch}", f"{self.name}: {cause}")
        if self.is_joining:
            return await self.join()
        await self._registry.set(f"ready/{epoch}/{self.name}", "ready")
        self._reforms += 1
        eligible = self.roster.everyone if self.entered else self.roster.members
        ready: set[str] = set()  # who have closed it, too
        self._detector.start_waiting()
        while (text := await self._registry.get(f"roster/{epoch + 1}")) is None:
            impatient = self._detector.impatient()
            if self.name == await self._first_left(eligible, ready, impatient):  # others need not look at all
                lost = self._detector.lost(eligible)
                if impatient:
                    there = _without(eligible, lost)
                    lost += [name for name in there if not await self._is_ready(name, ready)]
                left = _without(eligible, lost)
                if await self._are_ready(left, ready):
                    following = self._following(left, lost, first)
                    text = await self._registry.set_once(f"roster/{epoch + 1}", following.to_text())
                    break
            await self._registry.pause()
        return await self._follow(Roster.from_text(text))

    async def _first_left(self, eligible: Sequence[str], seen: set[str], impatient: bool) -> str | None:
        """Return who is to write the next roster: the first who is not lost nor, in the end, stuck."""
        for name in eligible:
            if not self._detector.lost([name]) and (not impatient or await self._is_ready(name, seen)):
                return name
        return None

    async def _are_ready(self, names: Sequence[str], seen: set[str]) -> bool:
        """Return whether all of these workers have closed the epoch. The first who has not is waited for."""
        for name in names:
            if not await self._is_ready(name, seen):
                return False
        return True

    async def _is_ready(self, name: str, seen: set[str]) -> bool:
        """Return whether a worker has closed the epoch; those `seen` to have are not looked at again."""
        if name not in seen and await self._registry.get(f"ready/{self.roster.epoch}/{name}") is not None:
            seen.add(name)
        return name in seen

    def _following(self, left: Sequence[str], lost: Sequence[str], first: str) -> Roster:
        epoch = self.roster.epoch + 1
        if len(left) < self.minimum:
            reason = (
                f"{len(left)} of {self.world} workers are left ({', '.join(left)}), but at least "
                f"{self.minimum} must be: lost are {', '.join(lost)}; the first failure was on {first}"
            )
            return Roster(epoch, (), stopped=reason)
        if self._reforms > REFORMS:
            reason = (
                f"the workers lost each other {self._reforms} times in a row without finishing an exchange, "
                f"although all of them reach the store ({_some_of(left)}); last failure on {first}"
            )
            return Roster(epoch, (), stopped=reason)
        return Roster(epoch, tuple(left))

    async def _follow(self, roster: Roster) -> Roster:
        if roster.stopped:
            raise RankLost(roster.stopped)
        if self.name not in roster.ranks:
            raise RankDropped(
                f"{self.name} was silent, or could not be waited for, so the others went on without it "
                f"(epoch {roster.epoch}: {', '.join(roster.everyone)}); attach again to join them"
            )
        return await self._take(roster)


def _without(names: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return the names that are not among the others, in order."""
    gone = set(others)
    return [name for name in names if name not in gone]


class Requests:
    """The requests to join, as one worker looks at them again and again.

    A look reads new requests, and those that may still be granted: not all that there have ever been.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._seen = 0  # the number of requests at the last look
        self._open: list[int] = []  # the numbers of those that may still be granted

    async def count(self) -> int:
        """Return the number of all requests so far."""
        return await self._registry.add("requests", 0)

    async def names(self, gone: Collection[str] = ()) -> list[str]:
        """Return the workers that ask to join, in the order of their requests; some may be lost.

        Those who are `gone` will not return, and are not looked at again.
        """
        count = await self.count()
        self._open += range(self._seen + 1, count + 1)
        self._seen = count
        found = {number: await self._registry.get(f"request/{number}") for number in self._open}
        # A request that is granted becomes empty; one without a text is about to be written.
        self._open = [number for number, name in found.items() if name != "" and name not in gone]
        return [name for name in found.values() if name]


# --- texts of the registry: a stranger may reach the store in which they are


@lru_cache(maxsize=KEPT)  # in virtual time thousands of workers read the same one
def read_decision(text: str) -> tuple[str, tuple[str, ...]]:
    """Read a verdict, and the workers that are admitted; raise an error for any other text."""
    match read_json(text):
        case [str(verdict), list(admitted)] if verdict in (COMMIT, ABORT):
            if all(isinstance(name, str) for name in admitted):
                return verdict, tuple(admitted)
    raise foreign_text("a decision", text)


def read_number(text: str) -> int:
    """Read a number that a worker wrote; raise an error for any other text."""
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise foreign_text("a number", text)
    return int(text)


def _some_of(names: Sequence[str]) -> str:
    """List names; of many, the first and how many more there are."""
    more = [f"and {len(names) - MOST_NAMED} more"] if len(names) > MOST_NAMED else []
    return ", ".join([*names[:MOST_NAMED], *more])
