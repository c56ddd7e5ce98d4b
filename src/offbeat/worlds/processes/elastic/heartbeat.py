"""Heartbeat: a thread that shows that this worker lives, and watches whether the others do.

Silence is counted in own looks, not in seconds: a process that was stopped itself must not take all the
others, whose heartbeats it has missed, for lost. A worker that a launcher saw die, or that has left, is lost
at once: two counters, which are read several times between heartbeats, tell that somebody is gone or asks to
join.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from itertools import count
from threading import Event, Thread

import torch.distributed as dist

from offbeat.core.membership import BEAT_S, NEWS_PER_BEAT, SILENT_LOOKS, Registry, Requests
from offbeat.core.pending import block_on
from offbeat.core.roster import Roster
from offbeat.errors import RankLost
from offbeat.worlds.processes.elastic.registry import DEPARTURES, StoreRegistry, training_registry

EXIT_S = 5.0  # to wait for the end of the thread, which may wait for a store that is gone


class Heartbeat:
    """This worker's heartbeat, and its opinion on which of the others are lost."""

    def __init__(self, name: str, root: dist.Store, attachment: str, timeout_s: float) -> None:
        self.name = name
        self.timeout_s = timeout_s
        # A store's connection serves one call at a time, and a launcher writes to the root.
        self._root: Registry = StoreRegistry(root.clone())  # type: ignore[attr-defined]
        self._registry: Registry = training_registry(root.clone(), attachment)  # type: ignore[attr-defined]
        self._requests = Requests(self._registry)
        self.stale: deque[str] = deque()  # keys to delete
        self._roster = Roster(0, ())
        self._beats: dict[str, str | None] = {}
        self._silent_looks: Counter[str] = Counter()
        self._gone: dict[str, str] = {}  # names, and why
        self._candidates: list[str] = []
        self._asked: tuple[str, ...] = ()  # the workers that `lost` was called with last
        self._closed_epoch = 0
        self._news = (0, 0)  # the numbers of departures and requests, when they were last read
        self._waiting_since = time.monotonic()
        self._stop = Event()
        self._beat(0)
        self._thread = Thread(target=self._run, name="offbeat-heartbeat", daemon=True)
        self._thread.start()

    # --- on the worker's thread

    def watch(self, roster: Roster) -> None:
        """Watch the workers of this roster from now on."""
        self._roster = roster

    def is_broken(self) -> bool:
        """Return whether to give the roster's epoch up, as far as the last look shows."""
        return (
            self._closed_epoch == self._roster.epoch
            or bool(self.lost(self._roster.everyone))
            or self.impatient()
        )

    def start_waiting(self) -> None:
        self._waiting_since = time.monotonic()

    def impatient(self) -> bool:
        return time.monotonic() - self._waiting_since > self.timeout_s

    def lost(self, names: Sequence[str]) -> list[str]:
        self._asked = tuple(names)  # of one who asks to join, the roster is not known before
        return [name for name in names if name != self.name and self._is_lost(name)]

    def _is_lost(self, name: str) -> bool:
        return name in self._gone or self._silent_looks[name] >= SILENT_LOOKS

    def candidates(self) -> list[str]:
        candidates = self._candidates
        lost = self.lost(candidates)
        return [name for name in candidates if name not in lost]

    def leave(self, reason: str) -> None:
        """Stop the thread, and let the others know at once that this worker has left. May be called twice."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(EXIT_S)
        try:
            block_on(_leave(self._root, self.name, reason or "its loop has ended"))
        except RankLost:
            return  # nobody can be told: the store is gone, too

    # --- on the heartbeat's thread

    def _run(self) -> None:
        for look in count(1):
            if self._stop.wait(BEAT_S / NEWS_PER_BEAT):
                return
            beats, remaining = divmod(look, NEWS_PER_BEAT)
            try:
                if remaining:
                    block_on(self._look_for_news())
                else:
                    self._beat(beats)
                    block_on(self._look())
            except RankLost:
                return  # the worker's own next call fails in the same way, and says so

    def _beat(self, beats: int) -> None:
        block_on(_set(self._registry, f"beat/{self.name}", str(beats)))

    async def _look(self) -> None:
        while self.stale:
            await self._registry.delete(self.stale.popleft())
        roster = self._roster
        if await self._registry.get(f"closed/{roster.epoch}") is not None:
            self._closed_epoch = roster.epoch
        await self._read_news()
        for name in {*roster.everyone, *self._candidates} - {self.name}:
            beat = await self._registry.get(f"beat/{name}")
            self._silent_looks[name] = (
                self._silent_looks[name] + 1 if self._beats.get(name, "") == beat else 0
            )
            self._beats[name] = beat

    async def _look_for_news(self) -> None:
        news = await self._root.add(DEPARTURES, 0), await self._requests.count()
        if news != self._news:
            await self._read_news()
            self._news = news

    async def _read_news(self) -> None:
        """Read who asks to join, and who is gone; silence alone does not end a wish to join."""
        self._candidates = await self._requests.names(self._gone)
        for name in {*self._roster.everyone, *self._candidates, *self._asked} - {self.name, *self._gone}:
            process = name.partition(".")[0]  # of which this is one of several names
            note = await self._root.get(f"gone/{name}") or await self._root.get(f"gone/{process}")
            if note is not None:
                self._gone[name] = note


async def _set(registry: Registry, key: str, value: str) -> None:
    await registry.set(key, value)


async def _leave(root: Registry, name: str, reason: str) -> None:
    await root.set(f"gone/{name}", reason)
    await root.add(DEPARTURES, 1)
