"""A request to a virtual server: what a timeline shows of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from offbeat.core.ledger import AT_SERVER, Ledger, Span
from offbeat.core.port import PullResult
from offbeat.server.client import Operation
from offbeat.worlds.virtual.request import VirtualRequest


class Clock:
    """A scheduler that only tells the time, and resumes nobody."""

    def __init__(self) -> None:
        self.now = 0.0

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **others: None


def test_a_request_is_at_the_server_from_its_first_arrival_to_its_last_answer() -> None:
    """Two shards: the message leaves at 1, arrives at 2 and 3, is answered at 5 and 6, and is back at 7."""
    clock: Any = Clock()
    ledger = Ledger(0, lambda: clock.now)
    ledger.spans = []
    request: VirtualRequest[PullResult] = VirtualRequest(
        clock, ledger, Operation("pull", "4"), 80, "the server"
    )
    calls = [request.begin, request.begin, request.arrive, request.arrive, request.answer, request.answer]
    for clock.now, call in zip((1.0, 1.5, 2.0, 3.0, 5.0, 6.0), calls, strict=True):
        call()
    clock.now = 7.0
    request.complete(PullResult(staleness=3))
    assert ledger.spans == [
        Span(AT_SERVER, "4", 2.0, 6.0, "pull", 80, 3),
        Span("pull", "4", 1.0, 7.0, "", 80, 3),
    ]


def test_a_request_of_an_evaluation_is_in_no_timeline() -> None:
    clock: Any = Clock()
    ledger = Ledger(0, lambda: clock.now)
    ledger.spans = []
    with ledger.paused():
        VirtualRequest(clock, ledger, Operation("pull", ""), 80, "the server").complete(SimpleNamespace())
    assert [span.kind for span in ledger.spans] == ["evaluating"]
