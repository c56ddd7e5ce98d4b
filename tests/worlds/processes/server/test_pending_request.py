"""What a worker counts for an operation, and how it pays for the looks of others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from offbeat.core.ledger import Ledger
from offbeat.server.client import Operation
from offbeat.worlds.processes.server import pending_request
from offbeat.worlds.processes.server.looks import Debt
from offbeat.worlds.processes.server.pending_request import PendingRequest

pytestmark = pytest.mark.processes


class Answers:
    """Stands in for a channel to a shard that answers after so many seconds."""

    def __init__(self, now_s: list[float], after_s: float) -> None:
        self._now_s, self._after_s = now_s, after_s

    def finish(self, request: object, deadline: float) -> None:
        self._now_s[0] += self._after_s


def _asked(
    monkeypatch: pytest.MonkeyPatch, looked: tuple[float, float] = (0.0, 0.0)
) -> tuple[Ledger, list[float]]:
    """Compute for 10 s, then wait 6 s for an answer; return the ledger, and how long the worker pauses."""
    now_s, pauses = [100.0], []
    ledger = Ledger(1, lambda: now_s[0])
    ledger.spans = []
    ledger.start()

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now_s[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep)
    monkeypatch.setattr(pending_request, "time", clock)
    transport: Any = SimpleNamespace(
        ledger=ledger, shaper=None, timeout_s=60.0, debt=Debt(1), rejoin_if_fenced=lambda _: None
    )
    now_s[0] += 4.0
    request: Any = SimpleNamespace(began_s=0.0, ended_s=0.0, looked_s=looked)
    pairs: list[Any] = [(Answers(now_s, 6.0), request)]
    pending = PendingRequest(transport, Operation("pull", "1"), pairs, int, sent=0, nbytes=0)
    now_s[0] += 6.0
    pending.wait()
    assert pending.done()
    return ledger, pauses


def test_without_looks_all_that_is_blocked_is_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, pauses = _asked(monkeypatch)
    assert (ledger.seconds, ledger.wait_s, ledger.communicate_s, pauses) == (16, 6, 12, [])


@pytest.mark.parametrize(
    ("looked", "waits_s", "pauses_s"),
    [
        ((5.0, 0.0), 1, []),  # it stood still for as long as the other looked
        ((9.0, 0.0), 0, [3.0]),
        ((5.0, 2.0), 3, [2.0]),  # for two seconds it waited for one who had not stopped yet
        ((5.0, 8.0), 6, [5.0]),
    ],
)
def test_a_look_of_another_is_neither_waiting_nor_training(
    looked: tuple[float, float], waits_s: float, pauses_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, pauses = _asked(monkeypatch, looked=looked)
    assert (ledger.compute_s, ledger.wait_s, pauses) == (10, waits_s, pauses_s)
    assert ledger.communicate_s == 6 + waits_s
    assert ledger.clock() - 100 == ledger.seconds + looked[0], "and it stood still for all of it"
    assert ledger.spans is not None
    lasted = {span.kind: 0.0 for span in ledger.spans}
    for span in ledger.spans:
        lasted[span.kind] += span.end_s - span.start_s
    assert (lasted["waiting"], lasted["evaluating"]) == (waits_s, looked[0])
