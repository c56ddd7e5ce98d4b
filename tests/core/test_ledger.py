"""Ledger: bytes, seconds and waits, on a clock that the test sets."""

from __future__ import annotations

from offbeat.core.ledger import Ledger
from offbeat.worlds.processes.emulation import Shaper


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _ledger() -> tuple[Ledger, Clock]:
    clock = Clock()
    return Ledger(3, clock), clock


def test_time_runs_from_the_start_and_rests_in_pauses() -> None:
    ledger, clock = _ledger()
    clock.now += 5
    assert ledger.seconds == 0
    ledger.start()
    clock.now += 2
    ledger.start()  # a second time changes nothing
    clock.now += 1
    assert ledger.seconds == 3
    with ledger.paused():
        clock.now += 50
        with ledger.paused():
            clock.now += 50
        assert ledger.seconds == 3
    clock.now += 4
    assert ledger.seconds == 7


def test_computing_is_what_is_not_waiting() -> None:
    ledger, clock = _ledger()
    ledger.start()
    clock.now += 10
    ledger.waited(4)
    entry = ledger.totals()
    assert (entry.rank, entry.compute_s, entry.wait_s) == (3, 6, 4)


def test_what_another_evaluates_is_neither_waiting_nor_time() -> None:
    ledger, clock = _ledger()
    ledger.spans = []
    ledger.start()
    clock.now += 10
    ledger.waited(4, 3)
    entry = ledger.totals()
    assert (entry.compute_s, entry.wait_s, ledger.seconds) == (6, 1, 7)
    spans = [(span.kind, span.end_s - span.start_s) for span in ledger.spans]
    assert spans == [("waiting", 1), ("evaluating", 3)]


def test_a_pause_in_a_pause_is_one_evaluation() -> None:
    ledger, clock = _ledger()
    ledger.spans = []
    with ledger.paused():
        clock.now += 1
        with ledger.paused():
            clock.now += 1
    assert [span.end_s - span.start_s for span in ledger.spans] == [2]


def test_communicating_counts_the_time_in_which_anything_is_under_way() -> None:
    ledger, clock = _ledger()
    ledger.start()
    ledger.operation_started()
    clock.now += 1
    ledger.operation_started()  # two at a time count once
    clock.now += 1
    ledger.operation_ended()
    clock.now += 1
    ledger.operation_ended()
    clock.now += 10
    assert ledger.totals().communicate_s == 3
    ledger.communicated(2)
    assert ledger.totals().communicate_s == 5


def test_what_spans_a_pause_counts_outside_of_it_only() -> None:
    ledger, clock = _ledger()
    ledger.start()
    ledger.operation_started()
    clock.now += 1
    with ledger.paused():
        clock.now += 50
    clock.now += 2
    ledger.operation_ended()
    assert ledger.totals().communicate_s == 3


def test_steps_that_sent_are_synchronized_ones() -> None:
    ledger, _ = _ledger()
    ledger.operation_started()
    ledger.sent(100)
    ledger.operation_started()
    ledger.sent(20)
    ledger.step()
    ledger.operation_ended()
    ledger.step()
    ledger.operation_ended()
    ledger.step()
    entry = ledger.totals()
    assert (entry.steps, entry.sync_steps, entry.local_steps, entry.bytes_sent) == (3, 1, 2, 120)


def test_bytes_that_stay_on_the_host_are_sent_but_have_not_left_it() -> None:
    ledger, _ = _ledger()
    ledger.sent(100)
    ledger.sent(20, left_host=0)
    ledger.sent(8, left_host=3)
    ledger.sent_even_paused(1000)
    ledger.update_shard_sent(7)
    ledger.update_shard_sent(9)
    entry = ledger.totals()
    assert (entry.bytes_sent, entry.bytes_left_host) == (1137, 1112)


def test_nothing_is_counted_in_a_pause() -> None:
    ledger, _ = _ledger()
    with ledger.paused():
        ledger.sent(100)
        ledger.sent(100, left_host=0)
        ledger.waited(1)
        ledger.communicated(1)
    ledger.step()
    entry = ledger.totals()
    assert entry.bytes_left_host == 0
    assert (entry.bytes_sent, entry.wait_s, entry.communicate_s, entry.sync_steps) == (0, 0, 0, 0)


def test_flags_and_what_is_sent_aside_do_not_synchronize() -> None:
    ledger, clock = _ledger()
    ledger.start()
    for nbytes in (4, 63, 64):
        ledger.operation_started(nbytes)
        clock.now += 1
        ledger.operation_ended()
        ledger.step()
    with ledger.uncounted_sync():
        ledger.operation_started(1000)
        ledger.sent(1000)
    ledger.operation_ended()
    ledger.step()
    entry = ledger.totals()
    assert (entry.sync_steps, entry.local_steps, entry.lssr) == (1, 3, 0.75)
    assert (entry.communicate_s, entry.bytes_sent) == (3, 1000)


def test_what_a_slower_nic_has_yet_to_deliver_is_not_counted_as_sent() -> None:
    ledger, _ = _ledger()
    ledger.start()
    shaper = Shaper(8e6, ledger)
    shaper.deliver(500_000)
    assert ledger.communicate_s == 0.0
    shaper.delivered(500_000)
    assert ledger.communicate_s == 0.5
