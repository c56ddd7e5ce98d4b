"""Timelines, in the Chrome trace format: rows that add up, arrows with two ends, in either world."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offbeat import BSP, OSP, SSP, LocalSGD
from offbeat.core.ledger import Ledger, Span
from offbeat.core.port import Lane
from offbeat.experiments import trace
from offbeat.experiments.job import Job
from offbeat.experiments.process_run import RunOptions, run
from offbeat.experiments.tasks.digits import Digits
from offbeat.experiments.timeline import excerpt
from offbeat.server.client import Operation
from offbeat.worlds.processes.ledger import SharedLedger
from offbeat.worlds.processes.server.channel import Request
from offbeat.worlds.processes.server.looks import Debt
from offbeat.worlds.processes.server.transport import PendingRequest
from tests.support.crew import Crew
from tests.support.improvised import Improvised, Note
from tests.support.virtual_runs import BYTES_PER_S, AnyStrategy, close, cluster_of, keep_spans, play, ring_s
from tests.support.virtual_servers import ASK_S, ONE_NIC, SEND_S, STEPS, TRIP_S, WIDE

pytestmark = pytest.mark.virtual

Event = dict[str, Any]
SERVED = ("push to the server", "pull from the server")  # rows
EXCHANGES = ("all-reduce ", "broadcast ", "reduce-scatter ", "all-gather ", "all-to-all ")
COMPUTING = ("forward", "backward", "computing")
TICK_US = 1e-3  # a nanosecond: what is left when floats of µs are added up


class Timeline:
    """A trace file as a viewer sees it."""

    def __init__(self, file: Path) -> None:
        written = json.loads(file.read_text())
        assert written["displayTimeUnit"] == "ms"
        self.events: list[Event] = written["traceEvents"]

    def rows(self, worker: int) -> dict[str, list[Event]]:
        """Slices by the name of their row, in order of time; a slice before what it contains."""
        mine = [event for event in self.events if event["pid"] == worker]
        names = {e["tid"]: e["args"]["name"] for e in mine if e["ph"] == "M" and e["name"] == "thread_name"}
        rows: dict[str, list[Event]] = {name: [] for name in names.values()}
        for event in sorted((e for e in mine if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"])):
            rows[names[event["tid"]]].append(event)
        return rows

    @property
    def workers(self) -> dict[int, str]:
        names = [e for e in self.events if e["ph"] == "M" and e["name"] == "process_name"]
        return {event["pid"]: event["args"]["name"] for event in names}

    def counter(self, name: str) -> list[tuple[float, dict[str, int]]]:
        """The values of a counter, each with the second from which on it holds."""
        return [(e["ts"] / 1e6, e["args"]) for e in self.events if e["ph"] == "C" and e["name"] == name]


def end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def check(timeline: Timeline, workers: int, steps: int, served: tuple[str, ...] = ()) -> None:
    """What holds of any timeline."""
    assert {event["ph"] for event in timeline.events} <= {"M", "X", "s", "f", "C"}
    server = {workers: "server"} if served else {}
    assert timeline.workers == {rank: f"worker {rank}" for rank in range(workers)} | server
    assert min(e["ts"] for e in timeline.events if "ts" in e) == 0
    for rank in range(workers):
        rows = timeline.rows(rank)
        assert list(rows) == ["work", "communication", "communication in the background", *served]
        check_work(rows["work"], steps)
        lanes = rows["communication"] + rows["communication in the background"]
        assert all(event["name"].startswith(EXCHANGES) for event in lanes)
        assert all(event["args"]["bytes"] > 0 for event in lanes)
    check_arrows(timeline, workers)


def check_work(row: list[Event], steps: int) -> None:
    played = [event for event in row if event["name"].startswith("step ")]
    parts = [event for event in row if event["name"] in (*COMPUTING, "waiting")]
    rests = [event for event in row if event["name"] == "evaluating"]
    assert len(played) + len(parts) + len(rests) == len(row)
    assert [event["name"] for event in played] == [f"step {n}" for n in range(1, steps + 1)]
    for step in played:
        inside = [p for p in parts if step["ts"] - TICK_US <= p["ts"] and end(p) <= end(step) + TICK_US]
        assert inside, step
        assert inside[0]["ts"] == pytest.approx(step["ts"], abs=TICK_US)
        assert end(inside[-1]) == pytest.approx(end(step), abs=TICK_US)
        for one, next_ in pairwise(inside):
            assert end(one) == pytest.approx(next_["ts"], abs=TICK_US)
        parts = [part for part in parts if part not in inside]
    assert all(part["name"] == "waiting" for part in parts), "only draining is outside of steps"
    for one, next_ in pairwise(sorted(played + rests + parts, key=lambda e: (e["ts"], e["dur"]))):
        assert end(one) <= next_["ts"] + TICK_US


def check_arrows(timeline: Timeline, workers: int) -> None:
    starts = {e["id"]: e for e in timeline.events if e["ph"] == "s"}
    ends = {e["id"]: e for e in timeline.events if e["ph"] == "f"}
    slices = [e for e in timeline.events if e["ph"] == "X" and e["name"].startswith(EXCHANGES)]
    assert len(starts) == sum(e["ph"] == "s" for e in timeline.events), "no id comes twice"
    assert starts.keys() == ends.keys()
    assert len(starts) == len(slices)
    begun = {(e["pid"], e["tid"], e["ts"]) for e in slices}
    done = [(e["pid"], e["tid"], end(e)) for e in slices]
    for key, start in starts.items():
        arrival = ends[key]
        assert arrival["pid"] == (start["pid"] + 1) % workers
        assert (start["pid"], start["tid"], start["ts"]) in begun
        mine = [at for pid, tid, at in done if (pid, tid) == (arrival["pid"], arrival["tid"])]
        assert any(at == pytest.approx(arrival["ts"], abs=TICK_US) for at in mine)


@pytest.mark.parametrize(
    "strategy",
    [
        BSP(),
        LocalSGD(period=3),
        Improvised(bars=((Note(1000, Lane.BACK, held=True), Note(1000)), (), (Note(9000, held=True),))),
    ],
    ids=lambda strategy: strategy.name,
)
def test_a_virtual_timeline_adds_up(tmp_path: Path, strategy: AnyStrategy) -> None:
    run = play(cluster_of(0.01, 0.03, 0.02), strategy, 8, evaluate_every=3, prepare=keep_spans)
    trace.write(tmp_path / "deep" / "trace.json", [ledger.spans or [] for ledger in run.ledgers])
    timeline = Timeline(tmp_path / "deep" / "trace.json")
    check(timeline, 3, 8)
    for rank, ledger in enumerate(run.ledgers):
        parts = timeline.rows(rank)["work"]
        totals = ledger.totals()
        for names, seconds in ((COMPUTING, totals.compute_s), (("waiting",), totals.wait_s)):
            shown = sum(part["dur"] for part in parts if part["name"] in names)
            assert shown == pytest.approx(1e6 * seconds, rel=1e-9, abs=TICK_US)


def test_a_timeline_says_when_what_happened(tmp_path: Path) -> None:
    """Two workers, 1 and 3 s a step: the faster computes, waits for the other, and waits for the wire."""
    run = play(cluster_of(1.0, 3.0), BSP(), 2, prepare=keep_spans)
    trace.write(tmp_path / "trace.json", [ledger.spans or [] for ledger in run.ledgers])
    rows = Timeline(tmp_path / "trace.json").rows(0)
    step_us = 1e6 * (3 + ring_s(4036, 2))
    seen = [(e["name"], pytest.approx(e["ts"]), pytest.approx(e["dur"])) for e in rows["work"]]
    assert [(name, ts, dur) for name, ts, dur in seen if name != "evaluating"] == [
        ("step 1", 0.0, step_us),
        ("forward", 0.0, pytest.approx(1e6 / 3)),
        ("backward", pytest.approx(1e6 / 3), pytest.approx(2e6 / 3)),
        ("waiting", 1e6, step_us - 1e6),
        ("step 2", step_us, step_us),
        ("forward", step_us, pytest.approx(1e6 / 3)),
        ("backward", step_us + 1e6 / 3, pytest.approx(2e6 / 3)),
        ("waiting", step_us + 1e6, step_us - 1e6),
    ]
    assert [e["ts"] for e in rows["communication"]] == [pytest.approx(1e6), pytest.approx(step_us + 1e6)]
    assert not rows["communication in the background"]


def _traced(strategy: AnyStrategy, file: Path) -> None:
    run(
        Job(task=Digits(), strategy=strategy, workers=2, steps=6, evaluate_every=4, work="equal"),
        RunOptions(trace=file),
        _nobody,
    )


def _nobody(worker: object) -> list[Any]:
    return []


# --- what goes to a server


def lengths(ledger: Ledger, *kinds: str) -> list[float]:
    """How long each span of these kinds took; no two of them at once."""
    spans = sorted((s for s in ledger.spans or () if s.kind in kinds), key=lambda s: (s.start_s, s.end_s))
    for one, next_ in pairwise(spans):
        assert one.end_s <= next_.start_s + 1e-12, (one, next_)
    return [span.end_s - span.start_s for span in spans]


@pytest.mark.parametrize("world", [1, 3])
def test_pushes_and_pulls_take_what_their_bytes_take(world: int) -> None:
    """In lock step through one NIC: all push at once, all ask at once, and all are answered at once."""
    cluster = cluster_of(*[0.05] * world, server=ONE_NIC)
    run = play(cluster, SSP(staleness=0), STEPS, evaluate_every=2, prepare=keep_spans)
    for ledger in run.ledgers:
        assert lengths(ledger, "push") == [close(world * SEND_S)] * STEPS
        assert lengths(ledger, "pull") == [close(world * (ASK_S + SEND_S))] * STEPS
        both = lengths(ledger, "push", "pull")
        assert sum(both) == close(ledger.totals().communicate_s) == close(ledger.totals().wait_s)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_pull_that_waits_for_a_straggler_is_as_long_as_that(overlap: bool) -> None:
    """A server that only the workers' links limit; one shard, so a worker's next follows its last."""
    steps = 12
    strategy = SSP(staleness=3, overlap=overlap)
    run = play(cluster_of(1.0, 4.0, server=WIDE), strategy, steps, prepare=keep_spans)
    fast, slow = run.ledgers
    for ledger in run.ledgers:
        assert lengths(ledger, "push") == [close(SEND_S)] * steps
        assert sum(lengths(ledger, "push", "pull")) == close(ledger.totals().communicate_s)
    assert lengths(slow, "pull") == [close(ASK_S + SEND_S)] * steps
    ahead = 2 if overlap else 3
    end_s = (steps - ahead) * 4 + (1 if overlap else steps - ahead) * TRIP_S
    if not overlap:  # whatever it did not compute it pushed or pulled
        assert sum(lengths(fast, "pull")) == close(end_s - steps * 1.0 - steps * SEND_S)
    assert max(lengths(fast, "pull")) > 2.0


def test_sums_take_what_their_bytes_take() -> None:
    """Two workers' gradients, 4036 bytes with their marks, go in and out of one NIC."""
    run = play(cluster_of(1.0, 1.0, server=ONE_NIC), OSP(on="server", budget=0), STEPS, prepare=keep_spans)
    for ledger in run.ledgers:
        assert lengths(ledger, "combine") == [close(4 * 4036 / BYTES_PER_S)] * STEPS
        assert sum(lengths(ledger, "combine")) == close(ledger.totals().communicate_s)


def test_a_timeline_has_rows_for_a_server(tmp_path: Path) -> None:
    run = play(cluster_of(0.01, 0.03), SSP(staleness=2), 8, evaluate_every=3, prepare=keep_spans)
    trace.write(tmp_path / "trace.json", [ledger.spans or [] for ledger in run.ledgers])
    timeline = Timeline(tmp_path / "trace.json")
    check(timeline, 2, 8, SERVED)
    for rank in (0, 1):
        rows = timeline.rows(rank)
        assert [event["name"] for event in rows["push to the server"]] == [f"push {n}" for n in range(1, 9)]
        assert [event["name"] for event in rows["pull from the server"]] == [
            f"pull {n}" for n in range(2, 10)
        ]
    kinds = {
        kind
        for spans in excerpt([ledger.spans or [] for ledger in run.ledgers])["workers"]
        for kind, _, _ in spans
    }
    assert kinds == {"computing", "waiting", "evaluating", "push", "pull"}


@pytest.mark.parametrize("overlap", [False, True])
def test_a_real_timeline_has_rows_for_a_server(
    crew: Callable[[int], Crew], tmp_path: Path, overlap: bool
) -> None:
    crew(2).run(_traced, SSP(staleness=2, overlap=overlap), tmp_path / "trace.json")
    timeline = Timeline(tmp_path / "trace.json")
    check(timeline, 2, 6, SERVED)
    for rank in (0, 1):
        rows = timeline.rows(rank)
        assert all(0 <= pull["args"]["staleness"] <= 2 for pull in rows["pull from the server"])
        assert all(push["args"]["bytes"] > 0 for push in rows["push to the server"])
        last = max(end(event) for event in rows["work"])
        assert [event["name"] for event in rows["push to the server"]] == [f"push {n}" for n in range(1, 7)]
        for push, pull in zip(rows["push to the server"], rows["pull from the server"], strict=True):
            assert push["ts"] <= end(push) <= end(pull) + TICK_US, "an answer comes after the push before it"
            assert end(pull) <= last + TICK_US
        for one, next_ in pairwise(rows["pull from the server"]):
            assert end(one) <= next_["ts"] + TICK_US, "the next is asked for when the last is there"
        # Of a wait, what another worker's evaluation took is shown as that: it is no time of training.
        waits = [event for event in rows["work"] if event["name"] in ("waiting", "evaluating")]
        if not overlap:
            for pull in rows["pull from the server"]:
                assert any(w["ts"] <= end(pull) <= end(w) + TICK_US for w in waits), "it is waited for"


def test_a_push_ends_when_the_last_receipt_came_not_when_somebody_looks() -> None:
    now = [100.0]
    ledger = SharedLedger(0, lambda: now[0])
    ledger.spans = []
    transport: Any = SimpleNamespace(
        ledger=ledger, shaper=None, timeout_s=1.0, rejoin_if_fenced=lambda deadline: None, debt=Debt(2)
    )
    requests = [Request([], [], began_s=101.0, ended_s=104.0), Request([], [], began_s=102.0, ended_s=103.0)]
    channel: Any = SimpleNamespace(finish=lambda request, deadline: None)
    sent = [(channel, request) for request in requests]
    pending = PendingRequest(transport, Operation("push", "7"), sent, lambda: True, sent=0, nbytes=12)
    now[0] = 200.0
    pending.wait()
    assert ledger.spans[0] == Span("push", "7", 101.0, 104.0, nbytes=12)


@pytest.mark.parametrize("strategy", [BSP(), LocalSGD(period=2)], ids=str)
def test_a_real_timeline_adds_up(crew: Callable[[int], Crew], tmp_path: Path, strategy: AnyStrategy) -> None:
    crew(2).run(_traced, strategy, tmp_path / "trace.json")
    timeline = Timeline(tmp_path / "trace.json")
    check(timeline, 2, 6)
    assert len(timeline.rows(0)["communication"]) == (6 if strategy == BSP() else 3)
    work = [event["name"] for event in timeline.rows(0)["work"]]
    assert work.count("forward") >= 6 and work.count("backward") >= 6


def test_a_counter_shows_how_many_workers_wait(tmp_path: Path) -> None:
    one = [Span("waiting", "", 1.0, 3.0), Span("step", "1", 0.0, 4.0)]
    two = [Span("waiting", "", 2.0, 3.5), Span("step", "1", 0.0, 4.0)]
    trace.write(tmp_path / "t.json", [one, two])
    timeline = Timeline(tmp_path / "t.json")
    assert {e["name"] for e in timeline.events if e["ph"] == "C"} == {"workers waiting"}
    waiting = [(at_s, args["workers"]) for at_s, args in timeline.counter("workers waiting")]
    assert waiting == [(1.0, 1), (2.0, 2), (3.0, 1), (3.5, 0)]


def test_a_slice_carries_its_seconds_number_bytes_and_staleness(tmp_path: Path) -> None:
    sent = Span("front", "7", 1.0, 3.5, "reduce_scatter", 640)
    pull = Span("pull", "3", 1.0, 2.0, nbytes=80, staleness=0)
    trace.write(tmp_path / "t.json", [[pull, sent, Span("step", "1", 1.0, 4.0)]])
    events = {e["name"]: e for e in Timeline(tmp_path / "t.json").events if e["pid"] == 0}
    assert events["reduce-scatter 7"]["args"] == {"seconds": 2.5, "number": "7", "bytes": 640}
    assert events["pull 3"]["args"] == {"seconds": 1.0, "number": "3", "bytes": 80, "staleness": 0}


def test_the_servers_row_shows_whom_it_holds_back(tmp_path: Path) -> None:
    """Steps of 1 and 4 s under a bound of 1: the server holds back the fast worker, never the slow one."""
    strategy = SSP(staleness=1, overlap=False)
    run = play(cluster_of(1.0, 4.0, server=WIDE), strategy, 5, prepare=keep_spans)
    trace.write(tmp_path / "t.json", [ledger.spans or [] for ledger in run.ledgers])
    timeline = Timeline(tmp_path / "t.json")
    rows = timeline.rows(2)
    assert timeline.workers[2] == "server"
    assert list(rows) == ["requests of worker 0", "requests of worker 1"]
    held = [[e["dur"] / 1e6 for e in row if e["name"].startswith("pull")] for row in rows.values()]
    assert all(seconds == pytest.approx(0, abs=1e-9) for seconds in held[1])
    assert held[0][:2] == [pytest.approx(0, abs=1e-9), pytest.approx(2.0, rel=0.05)]
    pulls = timeline.rows(0)["pull from the server"]
    for asked, served in zip(
        pulls, [e for e in rows["requests of worker 0"] if "pull" in e["name"]], strict=True
    ):
        assert asked["ts"] < served["ts"] and end(served) < end(asked)
        assert served["args"]["staleness"] == asked["args"]["staleness"] <= 1
    read = [args["steps"] for _, args in timeline.counter("staleness")]
    assert Counter(read) == sum((ledger.staleness for ledger in run.ledgers), Counter())
    for name, unit in (("bytes in flight", "bytes"), ("requests at the server", "requests")):
        counted = [args[unit] for _, args in timeline.counter(name)]
        assert max(counted) > 0 and min(counted) == counted[-1] == 0


def test_without_a_servers_own_view_its_row_shows_the_workers(tmp_path: Path) -> None:
    push = Span("push", "1", 1.0, 2.0, nbytes=8)
    trace.write(tmp_path / "t.json", [[push, Span("step", "1", 0.0, 2.0)]])
    (shown,) = Timeline(tmp_path / "t.json").rows(1)["requests of worker 0"]
    assert (shown["name"], shown["ts"], shown["dur"]) == ("push 1", 1e6, 1e6)
