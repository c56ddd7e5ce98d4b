"""The metrics store: every rank's last post, read without waiting, and values gathered in step."""

from __future__ import annotations

import socket
from threading import Event

import pytest
import torch.distributed as dist

from offbeat.core.ledger import WorkerTotals
from offbeat.errors import RankLost
from offbeat.worlds.processes import metrics_store
from offbeat.worlds.processes.metrics_store import MetricsStore
from offbeat.worlds.processes.store import DeadlineStore
from tests.support.beside import beside
from tests.support.limits import HANG_S
from tests.support.waiting import until

pytestmark = pytest.mark.processes


def ranks(world: int) -> list[MetricsStore]:
    store = dist.HashStore()
    return [MetricsStore(store, rank, world) for rank in range(world)]


def test_only_ranks_that_have_posted_are_read() -> None:
    first, second, third = ranks(3)
    assert first.latest() == [] and first.hosts() == {}
    assert third.post(WorkerTotals(rank=2, steps=4, staleness={"1": 3}))
    until(first.latest)
    assert first.latest() == [WorkerTotals(rank=2, steps=4, staleness={"1": 3})]
    assert first.hosts() == {2: socket.gethostname()}
    assert second.post(WorkerTotals(rank=1), at_once=True)
    assert [totals.rank for totals in first.latest()] == [1, 2], "this one is there when the call returns"


def test_a_rank_posts_no_more_often_than_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = ranks(2)
    assert first.post(WorkerTotals(rank=0, steps=1))
    monkeypatch.setattr(metrics_store, "EVERY_S", 2 * HANG_S)
    assert not first.post(WorkerTotals(rank=0, steps=2))
    assert first.latest()[0].steps == 1
    monkeypatch.setattr(metrics_store, "EVERY_S", 0.0)
    assert first.post(WorkerTotals(rank=0, steps=3))
    assert first.latest()[0].steps == 3


class Held(dist.HashStore):
    """A store on which a value takes until it is let go, and then perhaps fails."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.fails = Event(), False

    def set(self, key: str, value: str) -> None:
        assert self.go.wait(HANG_S)
        if self.fails:
            raise RuntimeError("connection reset")
        super().set(key, value)


def test_training_does_not_wait_for_a_post(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_store, "EVERY_S", 0.0)
    store = Held()
    only = MetricsStore(store, 0, 1)
    assert only.post(WorkerTotals(rank=0, steps=1)), "it is on its way"
    assert not only.post(WorkerTotals(rank=0, steps=2)), "the first one is on its way"
    store.go.set()
    until(lambda: only.post(WorkerTotals(rank=0, steps=3)))
    until(lambda: only.latest()[0].steps == 3)


def test_after_a_post_that_failed_the_next_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_store, "EVERY_S", 0.0)
    store = Held()
    store.fails = True
    store.go.set()
    only = MetricsStore(DeadlineStore(store, 0.05), 0, 1)
    only.post(WorkerTotals(rank=0, steps=1))

    def post_again() -> bool:
        try:
            only.post(WorkerTotals(rank=0, steps=2))
        except RankLost as lost:
            return "connection reset" in str(lost)
        return False

    until(post_again)
    store.fails = False

    def posted() -> bool:
        try:
            only.post(WorkerTotals(rank=0, steps=3))
            return [totals.steps for totals in only.latest()] == [3] and bool(only.hosts())
        except RankLost:  # a busy machine missed the deadline
            return False

    until(posted)


def test_values_are_gathered_by_call_and_rank() -> None:
    """Rank 1 may be a call ahead: its next value is not mistaken for its last."""
    first, second = ranks(2)
    assert second.gather_json({"loss": [1, None]}, HANG_S) == []
    assert second.gather_json("next", HANG_S) == []
    assert beside(first.gather_json, 7, HANG_S).result(HANG_S) == [7, {"loss": [1, None]}]
    assert first.gather_json(8, HANG_S) == [8, "next"]


def test_a_rank_that_brings_nothing_is_waited_for_no_longer_than_said() -> None:
    first, _ = ranks(2)
    with pytest.raises(RuntimeError):
        first.gather_json(7, 0.01)
