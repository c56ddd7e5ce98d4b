"""Events of a run: each told once, in words, with its kind and its time."""

from __future__ import annotations

from dataclasses import asdict
from json import dumps, loads
from typing import Any

import pytest

from offbeat import GSSP
from offbeat.core.ledger import KEPT_EVENTS, Ledger, WorkerTotals
from offbeat.core.port import Notice
from offbeat.experiments.callbacks.events import SILENT_STEPS, SLOW_AGAIN_S, EventList
from tests.support.virtual_runs import cluster_of, play


def all_of(events: EventList) -> list[tuple[float, str, str]]:
    return [tuple(event) for event in events.told]


def totals(rank: int, steps: int = 0, **others: Any) -> WorkerTotals:
    """As they come from the store."""
    return WorkerTotals(**loads(dumps(asdict(WorkerTotals(rank=rank, steps=steps, **others)))))


def test_events_are_told_once_and_in_words() -> None:
    events = EventList()
    both = [totals(0), totals(1, refused=2)]
    events.update(both[:1], None, 1.0)
    for _ in range(3):
        events.update(both, None, 2.0)
    events.update([totals(1, refused=3)], "rank 1", 3.0)
    events.update([totals(1, refused=3)], None, 4.0)
    assert all_of(events) == [
        (2.0, "joined", "rank 1 joined"),
        (2.0, "refused", "2 updates of rank 1 not used: too late, or not finite"),
        (3.0, "lost", "rank 0 left"),
        (3.0, "refused", "1 update of rank 1 not used: too late, or not finite"),
        (3.0, "slow", "rank 1 is slower than the others"),
        (4.0, "slow", "no worker is slower any more"),
    ]


def test_stragglers_that_change_every_second_do_not_fill_the_list() -> None:
    events = EventList()
    for second in range(int(SLOW_AGAIN_S)):
        events.update([totals(0), totals(1)], "rank 0" if second % 2 else None, float(second))
    assert [text for _, _, text in all_of(events)] == [
        "rank 0 is slower than the others",
        "no worker is slower any more",
    ]
    events.update([totals(0), totals(1)], None, SLOW_AGAIN_S)
    events.update([totals(0), totals(1)], "rank 0", SLOW_AGAIN_S + 1)
    assert all_of(events)[-1] == (SLOW_AGAIN_S + 1, "slow", "rank 0 is slower than the others")


def test_a_worker_that_stops_is_lost_and_one_that_moves_on_has_rejoined() -> None:
    """Worker 1 makes a step in 0.5 s, then none for 20 of them; worker 2 is slow, and never lost."""
    events = EventList(total_steps=1000)
    for second in range(60):
        stopped = 10 if 10 <= second < 40 else second
        events.update([totals(0, 10 * second), totals(1, 2 * stopped), totals(2, second // 9)], None, second)
    late_s = 10.0 + SILENT_STEPS * 0.5
    assert all_of(events) == [
        (late_s + 1, "lost", f"rank 1 has made no step for {late_s + 1 - 10:g} s"),
        (40.0, "rejoined", "rank 1 trains again"),
    ]


def test_a_worker_that_has_made_all_its_steps_is_not_lost() -> None:
    events = EventList(total_steps=20)
    for second in range(60):
        events.update([totals(0, second), totals(1, min(20, 10 * second))], None, second)
    assert all_of(events) == []


def test_a_new_roster_and_a_new_plan_are_told_and_small_changes_are_not() -> None:
    events = EventList()
    for second, (rosters, planned) in enumerate([(1, 0), (1, 16), (1, 15), (2, 16), (2, 8), (2, 9)]):
        events.update([totals(0, second, rosters=rosters, planned_steps=planned)], None, second)
    assert [(kind, text) for _, kind, text in all_of(events)] == [
        ("regrouped", "rank 0 has connected anew, with the workers that are there now"),
        ("planned", "rank 0 makes 8 local steps in a round, 16 before"),
    ]


def test_what_a_worker_tells_arrives_once_in_order_and_with_its_time() -> None:
    now = [0.0]
    ledger, events = Ledger(3, lambda: now[0]), EventList()
    ledger.start()
    for second in (2, 5):
        now[0] = float(second)
        ledger.record(Notice("changed", f"period {second}"), planned_steps=7.0)
        for _ in range(2):
            events.update([totals(3, events=ledger.totals().events)], None, second + 1)
    assert all_of(events) == [(2.0, "changed", "rank 3: period 2"), (5.0, "changed", "rank 3: period 5")]
    assert ledger.totals().planned_steps == 7


def test_only_the_latest_events_travel_and_none_is_told_twice() -> None:
    ledger, events = Ledger(0, lambda: 0.0), EventList()
    for number in range(2 * KEPT_EVENTS):
        ledger.record(Notice("changed", str(number)))
        events.update([totals(0, events=ledger.totals().events)], None, 0.0)
    assert len(ledger.totals().events) == KEPT_EVENTS
    assert [event.text for event in events.told] == [f"rank 0: {n}" for n in range(2 * KEPT_EVENTS)]


@pytest.mark.virtual
def test_gssp_tells_when_a_worker_changes_groups() -> None:
    run = play(cluster_of(0.01, 0.01, 0.04), GSSP(window=4, staleness=2), 12)
    texts = [
        [text for _, _, kind, text in each.totals().events if kind == "regrouped"] for each in run.ledgers
    ]
    assert texts == [["now in the fastest group"]] * 2 + [["now in the slowest group"]]
