"""The timeline of a run in the Chrome trace format, which Perfetto and chrome://tracing open.

Each worker is a process of the trace, with a row for its work (steps, split into computing and waiting;
evaluations), a row per lane for its collectives, and a row for each kind of request to a server, from sending
until the answer. Arrows lead from each worker's operation to the next rank's. The ledgers record the
spans, in either world; the time of a step that is not waiting is computing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from offbeat.core.ledger import Span

Event = dict[str, Any]

LANES = {"front": 1, "back": 2}
LANE_ROWS = {"front": "communication", "back": "communication in the background"}
SERVER_ROWS = {"push": 3, "pull": 4, "combine": 5}
SERVER_NAMES = {"push": "push to the server", "pull": "pull from the server", "combine": "sum at the server"}
EXCERPT_SPANS = 240  # per worker
EXCERPT_WORKERS = 16
OTHER_CLOCK_S = 1.0  # clocks that differ by more than this are those of different hosts


def write(path: Path, workers: list[list[Span]]) -> None:
    """Write the timeline of all workers, in order of rank."""
    workers = aligned(workers)
    origin = min((span.start_s for spans in workers for span in spans), default=0.0)
    events = [event for rank, spans in enumerate(workers) for event in _rows(rank, spans, origin)]
    events += _arrows(workers, origin)
    events += _waiting_counter(workers, origin)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))


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
        shifted.append([Span(s.kind, s.name, s.start_s - ahead, s.end_s - ahead) for s in spans])
    return shifted


def computing(step: Span, waits: list[Span]) -> Iterator[Span]:
    """Yield the parts of a step in which the worker was not waiting."""
    begun = step.start_s
    for wait in waits:
        if wait.start_s > begun:
            yield Span("computing", "", begun, wait.start_s)
        begun = max(begun, wait.end_s)
    if step.end_s > begun:
        yield Span("computing", "", begun, step.end_s)


def parts(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield the recorded spans, and after each step its parts of computing."""
    waits: list[Span] = []
    for span in sorted(spans, key=lambda s: s.end_s):
        yield span
        if span.kind == "waiting":
            waits.append(span)
        elif span.kind == "step":
            yield from computing(span, [wait for wait in waits if wait.start_s >= span.start_s])
            waits.clear()


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
            for part in parts(spans)
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


def _rows(rank: int, spans: list[Span], origin: float) -> Iterator[Event]:
    """Yield the events of one worker: names of its rows, then its spans."""
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"worker {rank}"}}
    kinds = {span.kind for span in spans}
    lanes = [(row, LANES[lane]) for lane, row in LANE_ROWS.items()]
    for row, thread in (
        ("work", 0),
        *lanes,
        *((SERVER_NAMES[kind], t) for kind, t in SERVER_ROWS.items() if kind in kinds),
    ):
        yield {"ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": row}}
    for span in parts(spans):
        if span.kind in LANES:
            yield _slice(rank, LANES[span.kind], f"communicating {span.name}", span, origin)
        else:
            yield _slice(
                rank, SERVER_ROWS.get(span.kind, 0), f"{span.kind} {span.name}".rstrip(), span, origin
            )


def _waiting_counter(workers: list[list[Span]], origin: float) -> list[Event]:
    """Make the counter of workers that wait, a step at every start and end of a wait."""
    waits = [span for spans in workers for span in spans if span.kind == "waiting"]
    changes = sorted([*((s.start_s, 1) for s in waits), *((s.end_s, -1) for s in waits)])
    waiting, events = 0, []
    for at_s, change in changes:
        waiting += change
        events.append(
            {
                "ph": "C",
                "pid": 0,
                "name": "workers waiting",
                "ts": (at_s - origin) * 1e6,
                "args": {"workers": waiting},
            }
        )
    return events


def _slice(rank: int, thread: int, name: str, span: Span, origin: float) -> Event:
    """Make the event of one span."""
    start_us, length_us = (span.start_s - origin) * 1e6, (span.end_s - span.start_s) * 1e6
    args = {"seconds": span.end_s - span.start_s} | ({"number": span.name} if span.name else {})
    return {
        "ph": "X",
        "pid": rank,
        "tid": thread,
        "name": name,
        "ts": start_us,
        "dur": length_us,
        "args": args,
    }


def _arrows(workers: list[list[Span]], origin: float) -> list[Event]:
    """Make arrows from the start of each operation to the end of the same operation at the next worker."""
    operations = [{(s.kind, s.name): s for s in spans if s.kind in LANES} for spans in workers]
    arrows: list[Event] = []
    for rank, own in enumerate(operations):
        neighbour = (rank + 1) % len(workers)
        for (lane, number), span in own.items():
            other = operations[neighbour].get((lane, number))
            if other is None or neighbour == rank:
                continue
            both = {"cat": "message", "name": "message", "id": f"{lane} {number} {rank}", "tid": LANES[lane]}
            arrows.append({**both, "ph": "s", "pid": rank, "ts": (span.start_s - origin) * 1e6})
            arrows.append(
                {**both, "ph": "f", "bp": "e", "pid": neighbour, "ts": (other.end_s - origin) * 1e6}
            )
    return arrows
