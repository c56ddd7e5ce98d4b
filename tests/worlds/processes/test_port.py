"""A wait whose patience runs out in the very moment in which the operation ends.

That happens where a wait takes about as long as the patience, or a multiple of it, and cannot be staged with
real processes: these operations end when told to.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from offbeat.core.ledger import Ledger
from offbeat.core.port import Lane, Signature
from offbeat.errors import RankLost
from offbeat.worlds.processes.failure import FailureDetector
from offbeat.worlds.processes.port import CollectiveOperation, ProcessPort
from tests.support.limits import HANG_S


class Work:
    """Ends as soon as this many waits have run out."""

    def __init__(self, waits: int, failure: str = "") -> None:
        self.waits, self.failure = waits, failure

    def is_completed(self) -> bool:
        return self.waits == 0

    def wait(self, patience: timedelta) -> None:
        if not self.is_completed():
            self.waits -= 1
            raise RuntimeError("our patience has run out")
        if self.failure:
            raise RuntimeError(self.failure)

    def get_future(self) -> Future[None]:
        return Future()


def operation(work: Work, timeout_s: float = HANG_S) -> CollectiveOperation[str]:
    """Of two ranks; the other one has left long after it, so nobody is missing."""
    store = HashStore()
    store.set("left/1", "99:")
    port = ProcessPort({}, FailureDetector(store, 0, 2), Ledger(0, time.monotonic), timeout_s)
    return CollectiveOperation(port, Signature("all_reduce", "mean", (64,)), Lane.BACK, work, "arrived", 64)


@pytest.mark.parametrize("waits", [0, 1, 2, 5])
def test_what_has_just_arrived_is_no_failure(waits: int) -> None:
    assert operation(Work(waits)).result() == "arrived"


def test_nor_is_it_too_late() -> None:
    assert operation(Work(1), timeout_s=0.0).result() == "arrived"


@pytest.mark.parametrize("waits", [0, 1, 2])
def test_what_has_just_failed_is_one(waits: int) -> None:
    with pytest.raises(RankLost):
        operation(Work(waits, failure="connection closed")).result()


def test_what_never_ends_is_given_up() -> None:
    with pytest.raises(RankLost):
        operation(Work(1_000_000), timeout_s=0.0).result()
