"""What follows a death: how long each phase of the return takes, and how long the others stand still."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from benchmarks.chaos.job import Event

PHASES = ("started", "admitted", "step")  # after which a killed worker is back


def returns(events: Mapping[int, Sequence[Event]]) -> dict[str, list[float]]:
    """Return the seconds from each kill to each phase of that worker's return; a new kill ends the search."""
    found: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for own in events.values():
        killed_s: float | None = None
        missing: list[str] = []
        for event in own:
            if event.name == "killed":
                killed_s, missing = event.at_s, list(PHASES)
            elif killed_s is not None and missing and event.name == missing[0]:
                found[missing.pop(0)].append(event.at_s - killed_s)
    return found


def pauses(events: Mapping[int, Sequence[Event]], at_s: Iterable[float], within_s: float) -> list[float]:
    """Return, for each of these moments, how long the others then stood still beyond their usual step.

    That is the median, over the workers that lived on, of the longest time from one step to the next, less
    the median step.
    """
    spans = {slot: _step_spans(own) for slot, own in events.items()}
    usual = statistics.median([end - begin for own in spans.values() for begin, end in own] or [0.0])
    found = []
    for moment in at_s:
        longest = [
            max((end - begin for begin, end in own if begin - within_s < moment < end), default=0.0)
            for own in spans.values()
        ]
        alive = [span for span in longest if span > 0]
        if alive:
            found.append(max(0.0, statistics.median(alive) - usual))
    return found


def _step_spans(own: Sequence[Event]) -> list[tuple[float, float]]:
    """Return the times of successive steps of one life of a worker."""
    return [
        (before.at_s, after.at_s) for before, after in pairwise(own) if before.name == after.name == "step"
    ]


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
