"""The material of timelines: the spans that ledgers have recorded, by one clock, and the parts of steps.

The time of a step that is not waiting is computing: forward, backward, and the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import Any

from offbeat.core.ledger import AT_SERVER, Span

LANES = ("front", "back")
PHASES = ("forward", "backward")
EXCERPT_SPANS = 400  # per worker
EXCERPT_WORKERS = 16
OTHER_CLOCK_S = 1.0  # clocks that differ by more than this are those of different hosts


def aligned(workers: list[list[Span]]) -> list[list[Span]]:
    """Shift workers of other hosts to worker 0's clock, by the end of the last operation they have in common.

    Without a common operation (with a server), their last spans are aligned: all workers end together.
    """
    first = workers[0] if workers else []
    ends = {(span.kind, span.name): span.end_s for span in first if span.kind in LANES}
    shifted = []
    for spans in workers:
        shared = [s.end_s - ends[s.kind, s.name] for s in spans if (s.kind, s.name) in ends]
        last = spans[-1].end_s - first[-1].end_s if spans and first else 0.0
        ahead = shared[-1] if shared else last
        ahead = ahead if abs(ahead) > OTHER_CLOCK_S else 0.0
        shifted.append([s._replace(start_s=s.start_s - ahead, end_s=s.end_s - ahead) for s in spans])
    return shifted


def parts(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield the recorded spans, and after each step its parts of computing, by phase; phases are no spans."""
    waits: list[Span] = []
    in_order = sorted(spans, key=lambda s: s.end_s)
    phases = deque(span for span in in_order if span.kind in PHASES)  # a step may end inside its backward
    for span in (span for span in in_order if span.kind not in PHASES):
        yield span
        if span.kind == "waiting":
            waits.append(span)
        elif span.kind == "step":
            while phases and phases[0].end_s <= span.start_s:
                phases.popleft()
            inside = _before(span.end_s, phases)
            for part in computing(span, [wait for wait in waits if wait.start_s >= span.start_s]):
                yield from _by_phase(part, inside)
            waits.clear()


def computing(step: Span, waits: list[Span]) -> Iterator[Span]:
    """Yield the parts of a step in which the worker was not waiting."""
    begun = step.start_s
    for wait in waits:
        if wait.start_s > begun:
            yield Span("computing", "", begun, wait.start_s)
        begun = max(begun, wait.end_s)
    if step.end_s > begun:
        yield Span("computing", "", begun, step.end_s)


def _before(end_s: float, phases: Iterable[Span]) -> list[Span]:
    """Return the first phases, those that begin before `end_s`."""
    return list(takewhile(lambda phase: phase.start_s < end_s, phases))


def _by_phase(part: Span, phases: list[Span]) -> Iterator[Span]:
    """Cut a part of computing where a phase begins or ends; each piece has the name of its phase."""
    begun = part.start_s
    for phase in phases:
        start_s, end_s = max(begun, phase.start_s), min(part.end_s, phase.end_s)
        if end_s <= start_s:
            continue
        if start_s > begun:
            yield Span("computing", "", begun, start_s)
        yield Span("computing", phase.kind, start_s, end_s)
        begun = end_s
    if part.end_s > begun:
        yield Span("computing", "", begun, part.end_s)


def excerpt(workers: list[list[Span]]) -> dict[str, Any]:
    """Extract the end of a run for the report: the spans of some workers, in seconds."""
    last = [spans[-EXCERPT_SPANS:] for spans in aligned(workers[:EXCERPT_WORKERS])]
    origin = max((_complete_from(spans) for spans in last if spans), default=0.0)
    end = max((span.end_s for spans in last for span in spans), default=0.0)
    if end <= origin:
        return {"seconds": 0.0, "workers": []}
    rows = [
        [
            (part.kind, round(max(part.start_s - origin, 0.0), 6), round(part.end_s - origin, 6))
            for part in parts(span for span in spans if span.kind not in (*PHASES, AT_SERVER))
            if part.end_s > origin and part.kind != "step"
        ]
        for spans in last
    ]
    return {"seconds": end - origin, "workers": rows}


def _complete_from(spans: list[Span]) -> float:
    """Return the time from which on all spans are present: the first step may lack some of its waits."""
    if len(spans) < EXCERPT_SPANS:
        return min(span.start_s for span in spans)
    return next((span.end_s for span in spans if span.kind == "step"), spans[-1].end_s)
