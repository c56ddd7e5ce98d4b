"""Recorder: keeps a run's summary on disk up to date, so that whatever happens a valid one is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from offbeat.ledger import Entry
from offbeat.summary import summarize, write
from offbeat.train import Job, Point, Watcher


class Recorder(Watcher):
    def __init__(
        self, job: Job, world: str, out: Path, latest: Callable[[], list[Entry]], **extra: Any
    ) -> None:
        self._job = job
        self._world = world
        self._out = out
        self._latest = latest
        self._extra = extra
        self._history: list[Point] = []
        self._complete = False

    def started(self, job: Job, total_steps: int) -> None:
        self._total_steps = total_steps

    def evaluated(self, history: list[Point], entries: list[Entry]) -> None:
        self._history = history
        self._complete = history[-1].step == self._total_steps
        self._write(entries)

    def closed(self) -> None:
        if not self._complete:  # stopped half-way: what is known until here
            self._write(self._latest())

    def _write(self, entries: list[Entry]) -> None:
        known = summarize(
            self._job, self._world, self._history, entries, complete=self._complete, **self._extra
        )
        write(self._out, known)
