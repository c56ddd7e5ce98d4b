"""The metrics store: every rank's last post, read without waiting, and values gathered in step."""

from __future__ import annotations

import socket

import pytest
import torch.distributed as dist

from offbeat.core.ledger import WorkerTotals
from offbeat.worlds.processes import metrics_store
from offbeat.worlds.processes.metrics_store import MetricsStore
from tests.support.beside import beside
from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes


def ranks(world: int) -> list[MetricsStore]:
    store = dist.HashStore()
    return [MetricsStore(store, rank, world) for rank in range(world)]


def test_only_ranks_that_have_posted_are_read() -> None:
    first, second, third = ranks(3)
    assert first.latest() == [] and first.hosts() == {}
    assert third.post(WorkerTotals(rank=2, steps=4, staleness={"1": 3}))
    assert first.latest() == [WorkerTotals(rank=2, steps=4, staleness={"1": 3})]
    assert first.hosts() == {2: socket.gethostname()}
    assert second.post(WorkerTotals(rank=1))
    assert [totals.rank for totals in first.latest()] == [1, 2]


def test_a_rank_posts_no_more_often_than_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = ranks(2)
    assert first.post(WorkerTotals(rank=0, steps=1))
    monkeypatch.setattr(metrics_store, "EVERY_S", 2 * HANG_S)
    assert not first.post(WorkerTotals(rank=0, steps=2))
    assert first.latest()[0].steps == 1
    monkeypatch.setattr(metrics_store, "EVERY_S", 0.0)
    assert first.post(WorkerTotals(rank=0, steps=3))
    assert first.latest()[0].steps == 3


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
