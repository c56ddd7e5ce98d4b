"""Spans of several hosts by one clock, the parts of steps, and the end of a run for a report."""

from __future__ import annotations

import pytest

from offbeat.core.ledger import AT_SERVER, Span
from offbeat.experiments import timeline


def test_other_clocks_are_put_right() -> None:
    """A host that booted 1000 s earlier; one whose clock differs by what an operation may take stays."""
    here = [Span("front", "1", 1.0, 2.0), Span("step", "1", 0.0, 2.0)]
    there = [Span(s.kind, s.name, s.start_s + 1000.25, s.end_s + 1000.25) for s in here]
    near = [Span(s.kind, s.name, s.start_s + 0.5, s.end_s + 0.5) for s in here]
    assert timeline.aligned([here, there, near]) == [here, here, near]


def worker_spans(steps: int, start_s: float) -> list[Span]:
    """Steps of a second, the second half of each waiting."""
    spans = []
    for n in range(steps):
        begun = start_s + n
        spans += [Span("waiting", "", begun + 0.5, begun + 1), Span("step", str(n + 1), begun, begun + 1)]
    return spans


def test_an_excerpt_of_a_short_run_is_all_of_it() -> None:
    cut = timeline.excerpt([worker_spans(2, 10.0), worker_spans(2, 10.25)])
    assert cut["seconds"] == 2.0, "from the later start on, both are known"
    halves = [("waiting", 0.5, 1.0), ("computing", 0.0, 0.5), ("waiting", 1.5, 2.0), ("computing", 1.0, 1.5)]
    assert cut["workers"][1] == halves
    assert cut["workers"][0][1] == ("computing", 0.0, 0.25)
    assert timeline.excerpt([]) == timeline.excerpt([[], []]) == {"seconds": 0.0, "workers": []}


def test_an_excerpt_of_a_long_run_begins_where_nothing_is_missing() -> None:
    steps = timeline.EXCERPT_SPANS  # two spans each: the first half of them is gone
    spans = worker_spans(steps, 0.0)[1:]  # and the cut goes through a step, whose wait is gone
    cut = timeline.excerpt([[*spans, Span("waiting", "", steps, steps + 1.0)]])
    assert cut["workers"][0][:2] == [("waiting", 0.5, 1.0), ("computing", 0.0, 0.5)]
    assert sum(end - start for kind, start, end in cut["workers"][0]) == pytest.approx(cut["seconds"])


def test_other_hosts_clocks_are_found_by_what_was_shared() -> None:
    here = [Span("front", "1", 0.0, 1.0), Span("front", "2", 1.0, 2.0)]
    there = [Span("front", "2", 101.0, 102.0), Span("step", "2", 101.0, 102.5)]
    assert timeline.aligned([here, there])[1] == [Span("front", "2", 1.0, 2.0), Span("step", "2", 1.0, 2.5)]


def test_computing_is_cut_into_forward_backward_and_the_rest() -> None:
    """A wait inside of backward, and a step that ends before its backward does."""
    spans = [
        Span("forward", "", 1.0, 2.0),
        Span("waiting", "", 3.0, 4.0),
        Span("step", "1", 0.0, 4.5),
        Span("backward", "", 2.0, 5.0),
        Span("step", "2", 4.5, 6.0),
    ]
    cut = [(s.name, s.start_s, s.end_s) for s in timeline.parts(spans) if s.kind == "computing"]
    assert cut == [
        ("", 0.0, 1.0),
        ("forward", 1.0, 2.0),
        ("backward", 2.0, 3.0),
        ("backward", 4.0, 4.5),
        ("backward", 4.5, 5.0),
        ("", 5.0, 6.0),
    ]


def test_an_excerpt_has_neither_phases_nor_the_servers_view() -> None:
    step, phase = Span("step", "1", 0.0, 2.0), Span("forward", "", 0.0, 1.0)
    cut = timeline.excerpt([[phase, Span(AT_SERVER, "1", 0.5, 1.0, "push"), step]])
    assert cut["workers"] == [[("computing", 0.0, 2.0)]]
