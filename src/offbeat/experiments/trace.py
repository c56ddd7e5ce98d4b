"""The timeline of a run in the Chrome trace format, which Perfetto and chrome://tracing open.

Each worker is a process of the trace, with a row for its work (steps, split into forward, backward, other
computing and waiting; evaluations), a row per lane for its collectives, and a row for each kind of request to
a server, from sending until the answer. Arrows lead from each worker's operation to the next rank's. The
server is a process of its own, with a row for each worker's requests: in virtual time from their arrival
until the answer leaves, so that one sees whom a rule holds back; over processes from sending until the
answer, which is what workers know of it. Counters show the workers that wait, the bytes in flight, the
requests at the server and the staleness of the weights that were read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offbeat.core.ledger import AT_SERVER, Span
from offbeat.experiments.timeline import aligned, parts

Event = dict[str, Any]

LANES = {"front": 1, "back": 2}
LANE_ROWS = {"front": "communication", "back": "communication in the background"}
SERVER_ROWS = {"push": 3, "pull": 4, "combine": 5}
SERVER_NAMES = {"push": "push to the server", "pull": "pull from the server", "combine": "sum at the server"}
VERBS = {"push": "push", "pull": "pull", "combine": "sum", "save": "save", "load": "load"}


def write(path: Path, workers: list[list[Span]]) -> None:
    """Write the timeline of all workers, in order of rank."""
    workers = aligned(workers)
    origin = min((span.start_s for spans in workers for span in spans), default=0.0)
    events = [event for rank, spans in enumerate(workers) for event in _rows(rank, spans, origin)]
    events += _server_rows(workers, origin)
    events += _arrows(workers, origin)
    events += _counters(workers, origin)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))


def _rows(rank: int, spans: list[Span], origin: float) -> Iterator[Event]:
    """Yield the events of one worker: names of its rows, then its spans."""
    kinds = {span.kind for span in spans}
    rows = {0: "work"} | {LANES[lane]: row for lane, row in LANE_ROWS.items()}
    rows |= {row: SERVER_NAMES[kind] for kind, row in SERVER_ROWS.items() if kind in kinds}
    yield from _names(rank, f"worker {rank}", rows)
    for span in parts(spans):
        if span.kind != AT_SERVER:
            thread = LANES.get(span.kind) or SERVER_ROWS.get(span.kind, 0)
            yield _slice(rank, thread, _name(span), span, origin)


def _name(span: Span) -> str:
    """Return the words for a span."""
    if span.kind in LANES:
        return f"{span.operation.replace('_', '-') or 'exchange'} {span.name}"
    if span.kind == "computing":
        return span.name or span.kind
    return f"{VERBS.get(span.kind, span.kind)} {span.name}".rstrip()


def _server_rows(workers: list[list[Span]], origin: float) -> Iterator[Event]:
    """Yield the events of the server, with a row per worker, if there is a server."""
    server = len(workers)
    seen = [_at_server(spans) for spans in workers]
    if not any(seen):
        return
    yield from _names(server, "server", {rank: f"requests of worker {rank}" for rank in range(server)})
    for rank, requests in enumerate(seen):
        for span in requests:
            yield _slice(server, rank, f"{VERBS[span.operation]} {span.name}".rstrip(), span, origin)


def _at_server(spans: list[Span]) -> list[Span]:
    """Return a worker's requests as the server saw them; where that is not known, as the worker did."""
    known = [span for span in spans if span.kind == AT_SERVER]
    return known or [span._replace(operation=span.kind) for span in spans if span.kind in SERVER_ROWS]


def _names(process: int, name: str, rows: dict[int, str]) -> Iterator[Event]:
    """Yield the events that name a process of the trace and its rows."""
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    for thread, row in rows.items():
        yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": row}}


def _slice(process: int, thread: int, name: str, span: Span, origin: float) -> Event:
    """Make the event of one span."""
    args: dict[str, Any] = {"seconds": span.end_s - span.start_s}
    args |= {"number": span.name} if span.name and span.kind != "computing" else {}
    args |= {"bytes": span.nbytes} if span.nbytes else {}
    args |= {} if span.staleness is None else {"staleness": span.staleness}
    start_us, length_us = (span.start_s - origin) * 1e6, (span.end_s - span.start_s) * 1e6
    placed = {"ph": "X", "pid": process, "tid": thread, "name": name}
    return {**placed, "ts": start_us, "dur": length_us, "args": args}


def _counters(workers: list[list[Span]], origin: float) -> Iterator[Event]:
    """Yield the counters: what waits, what travels, what the server has to do, and how old reads were."""
    spans = [span for each in workers for span in each]
    sent = [span for span in spans if span.kind in LANES or span.kind in SERVER_ROWS]
    requests = [span for each in workers for span in _at_server(each)]
    waits = [(span, 1) for span in spans if span.kind == "waiting"]
    yield from _counter("workers waiting", "workers", waits, origin)
    yield from _counter("bytes in flight", "bytes", [(span, span.nbytes) for span in sent], origin)
    yield from _counter("requests at the server", "requests", [(span, 1) for span in requests], origin)
    for rank, each in enumerate(workers):
        for span in each:
            if span.staleness is not None and span.kind != AT_SERVER:
                counted = {"ph": "C", "pid": rank, "name": "staleness", "ts": (span.end_s - origin) * 1e6}
                yield {**counted, "args": {"steps": span.staleness}}


def _counter(name: str, unit: str, weighed: list[tuple[Span, int]], origin: float) -> Iterator[Event]:
    """Yield the sum of the weights of all spans in progress, at each moment at which it changes."""
    changes: dict[float, int] = {}
    for span, weight in weighed:
        changes[span.start_s] = changes.get(span.start_s, 0) + weight
        changes[span.end_s] = changes.get(span.end_s, 0) - weight
    total = 0
    for at_s, change in sorted(changes.items()):
        total += change
        if change:
            yield {"ph": "C", "pid": 0, "name": name, "ts": (at_s - origin) * 1e6, "args": {unit: total}}


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
