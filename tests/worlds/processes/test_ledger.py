"""The ledger of a real worker: no operation is lost that starts or ends on another thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from offbeat.worlds.processes.ledger import SharedLedger
from tests.support.beside import beside
from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes

THREADS = 4


def test_operations_of_several_threads_are_all_counted() -> None:
    """Seconds in flight count from the first start to the last end, whichever threads they are on."""
    now = [0.0]
    ledger = SharedLedger(0, lambda: now[0])
    ledger.start()
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(lambda _: ledger.operation_started(1000), range(THREADS)))
        now[0] = 3.0
        list(threads.map(lambda _: ledger.operation_ended(), range(THREADS)))
        now[0] = 5.0
    ledger.step()
    assert ledger.usage().communicate_s == 3.0, "nothing is in flight after the last end"
    assert ledger.totals().sync_steps == 1


def test_one_thread_counts_while_another_waits() -> None:
    """Of two threads that count at once, the second reads the clock when the first has finished."""
    meeting, reads = Barrier(2), []

    def clock() -> float:
        reads.append(len(reads))
        if len(reads) == 1:  # the other thread comes while this one is counting
            meeting.wait(HANG_S)
        return float(len(reads))

    ledger = SharedLedger(0, clock)
    first = beside(ledger.operation_started)
    meeting.wait(HANG_S)
    ledger.operation_started()
    first.result(HANG_S)
    ledger.operation_ended()
    ledger.operation_ended()
    assert ledger.communicate_s == 3.0, "from the first reading of the clock to the fourth"
