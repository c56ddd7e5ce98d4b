"""The events of a run in words, each told once: found by comparing the workers' totals, or told by workers.

Strategy code tells an event by `port.record(Notice(kind, text))`; the worker's totals carry the latest ones.
Everything else is seen in the totals themselves, so that nobody has to be asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from offbeat.core.ledger import WorkerTotals

SLOW_AGAIN_S = 60.0  # of training, until the same straggler is told again
SILENT_STEPS = 20  # a worker that makes no step for as long as so many of its own is told as lost
LEAST_SILENCE_S = 1.0
PLAN_FACTOR = 1.5  # smaller changes of a plan are its daily business


class Told(NamedTuple):
    """An event, at a time of training, in seconds. `kind` is one word: lost, refused, changed, ..."""

    at_s: float
    kind: str
    text: str


class EventList:
    """The events so far, in the order in which they were noticed."""

    def __init__(self, total_steps: int = 0) -> None:
        self.told: list[Told] = []
        self._total_steps = total_steps  # of a worker; one that has made all of them is not lost
        self._workers: dict[int, Watch] = {}
        self._straggler: str | None = None
        self._slow_told: dict[str, float] = {}  # when each text on stragglers was told last

    def update(self, worker_totals: Sequence[WorkerTotals], straggler: str | None, seconds: float) -> None:
        """Compare the totals with those before, and add what is new."""
        seen = {totals.rank: totals for totals in worker_totals}
        gone = sorted(self._workers.keys() - seen.keys())
        self._add(seconds, (("lost", f"rank {rank} left") for rank in gone))
        for rank in gone:
            del self._workers[rank]
        first = not self._workers and not gone
        for rank, totals in sorted(seen.items()):
            if rank not in self._workers:
                self._workers[rank] = Watch(totals.steps, seconds)
                self._add(seconds, [] if first else [("joined", f"rank {rank} joined")])
            watch = self._workers[rank]
            self.told += [Told(at_s, kind, f"rank {rank}: {text}") for at_s, kind, text in watch.news(totals)]
            self._add(seconds, watch.changes(totals, seconds, self._total_steps))
        if straggler != self._straggler:
            now = f"{straggler} is slower than the others" if straggler else "no worker is slower any more"
            # On a busy machine the slowest worker is another one every second: each is told once in a while.
            if seconds - self._slow_told.get(now, -SLOW_AGAIN_S) >= SLOW_AGAIN_S:
                self._slow_told[now] = seconds
                self._add(seconds, [("slow", now)])
        self._straggler = straggler

    def _add(self, seconds: float, news: Iterator[tuple[str, str]] | list[tuple[str, str]]) -> None:
        self.told += [Told(seconds, kind, text) for kind, text in news]


class Watch:
    """The latest numbers of one worker, to see what changes."""

    def __init__(self, steps: int, seconds: float) -> None:
        self._steps = steps
        self._step_s = 0.0  # seconds of training per step, of late
        self._moved_at = seconds
        self._lost = False
        self._refused = self._outliers = self._rosters = self._planned = self._events = 0

    def news(self, totals: WorkerTotals) -> list[tuple[float, str, str]]:
        """Return what the worker itself has told since the last time."""
        new = [event for event in totals.events if event[0] > self._events]
        self._events = max([self._events, *(number for number, *_ in new)])
        return [(at_s, kind, text) for _, at_s, kind, text in new]

    def changes(self, totals: WorkerTotals, seconds: float, total_steps: int) -> Iterator[tuple[str, str]]:
        """Yield the kinds and texts of what the worker's totals show."""
        yield from self._moves(totals, seconds, total_steps)
        rank, more = totals.rank, totals.refused - self._refused
        if more > 0:
            updates = "1 update" if more == 1 else f"{more} updates"
            yield "refused", f"{updates} of rank {rank} not used: too late, or not finite"
        if totals.outliers > self._outliers:
            yield "outlier", f"a change of rank {rank} was left out of a merge: an outlier"
        self._outliers = totals.outliers
        if totals.rosters > self._rosters > 0:
            yield "regrouped", f"rank {rank} has connected anew, with the workers that are there now"
        before, planned = self._planned, totals.planned_steps
        if before and planned and max(before, planned) >= PLAN_FACTOR * min(before, planned):
            yield "planned", f"rank {rank} makes {planned} local steps in a round, {before} before"
            self._planned = planned
        self._refused, self._rosters = totals.refused, totals.rosters
        self._planned = self._planned or planned

    def _moves(self, totals: WorkerTotals, seconds: float, total_steps: int) -> Iterator[tuple[str, str]]:
        steps, passed_s = totals.steps - self._steps, seconds - self._moved_at
        if steps > 0:
            if self._lost:
                yield "rejoined", f"rank {totals.rank} trains again"
            else:
                self._step_s = passed_s / steps
            self._steps, self._moved_at, self._lost = totals.steps, seconds, False
            return
        patience_s = max(SILENT_STEPS * self._step_s, LEAST_SILENCE_S)
        if not self._lost and self._step_s and totals.steps < total_steps and passed_s > patience_s:
            self._lost = True
            yield "lost", f"rank {totals.rank} has made no step for {passed_s:.3g} s"
