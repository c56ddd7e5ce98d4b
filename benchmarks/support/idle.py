"""Idle cores: how much of the machine's processors was left while something was measured."""

from __future__ import annotations

import time
from pathlib import Path
from threading import Event, Thread
from types import TracebackType

EVERY_S = 0.5


def idle_s() -> float:
    """Return the seconds that all cores together have been idle."""
    idle, waiting = Path("/proc/stat").read_text().split("\n")[0].split()[4:6]
    return (int(idle) + int(waiting)) / 100


def cores() -> int:
    return sum(line.startswith("cpu") for line in Path("/proc/stat").read_text().splitlines()) - 1


class IdleCores:
    """Samples of the idle seconds, taken while the context is open."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []
        self._ended = Event()
        self._thread = Thread(target=self._sample, daemon=True)

    def __enter__(self) -> IdleCores:
        self._note()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._note()

    def share(self, from_s: float, until_s: float) -> float:
        """Return the idle share of all cores between two times, in seconds before the context ended."""
        end_s = self._samples[-1][0]
        inside = [each for each in self._samples if end_s - from_s <= each[0] <= end_s - until_s]
        if len(inside) < 2:
            inside = [self._samples[0], self._samples[-1]]
        (began_s, before), (ended_s, after) = inside[0], inside[-1]
        return (after - before) / (ended_s - began_s) / cores()

    def _sample(self) -> None:
        while not self._ended.wait(EVERY_S):
            self._note()

    def _note(self) -> None:
        self._samples.append((time.monotonic(), idle_s()))
