"""Heartbeats: who is lost, and who only seems to be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from offbeat.core.membership import Member
from offbeat.core.pending import block_on
from offbeat.core.roster import Roster
from offbeat.worlds.processes.elastic import heartbeat
from offbeat.worlds.processes.elastic.heartbeat import SILENT_LOOKS, Heartbeat
from offbeat.worlds.processes.elastic.registry import ROOT, StoreRegistry, report_death


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def pair(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Heartbeat, Heartbeat]]:
    """Two workers of a roster, which look and beat only when they are told to."""
    monkeypatch.setattr(heartbeat, "BEAT_S", 3600.0)
    root = dist.PrefixStore(ROOT, store)
    pair = Heartbeat("a.1", root, "training/0", 600.0), Heartbeat("b.1", root, "training/0", 600.0)
    for each in pair:
        each.watch(Roster(1, ("a.1", "b.1")))
    yield pair
    for each in pair:
        each.leave("")


def look(watcher: Heartbeat, times: int = 1) -> None:
    for _ in range(times):
        block_on(watcher._look())


def test_silence_is_counted_in_looks(pair: tuple[Heartbeat, Heartbeat]) -> None:
    one, other = pair
    look(one, SILENT_LOOKS)
    assert one.lost(["a.1", "b.1"]) == [], "the first look only shows what there is"
    other._beat(1)
    look(one, SILENT_LOOKS)
    assert not one.is_broken()
    look(one)
    assert one.lost(["a.1", "b.1"]) == ["b.1"]
    assert one.is_broken()
    other._beat(2)  # it was stopped, and goes on
    look(one)
    assert one.lost(["b.1"]) == []


def test_process_that_died_or_left_is_lost_at_once(pair, store: dist.TCPStore) -> None:
    one, other = pair
    report_death(store, "b")  # the process, whichever of its names it had
    look(one)
    assert one.lost(["b.1"]) == ["b.1"]
    one.leave("its loop has ended")
    look(other)
    assert other.lost(["a.1"]) == ["a.1"]


def test_news_are_read_between_heartbeats_and_count_no_silence(pair, store: dist.TCPStore) -> None:
    one, other = pair
    for _ in range(SILENT_LOOKS + 2):
        block_on(one._look_for_news())
    assert one.lost(["b.1"]) == [] and not one.candidates()
    block_on(Member("c.1", other._registry, other)._ask())
    block_on(one._look_for_news())
    assert one.candidates() == ["c.1"]
    report_death(store, "b")
    block_on(one._look_for_news())
    assert one.lost(["b.1"]) == ["b.1"]


def test_one_who_asks_to_join_learns_that_all_have_ended(pair, store: dist.TCPStore) -> None:
    newcomer = Heartbeat("c.1", dist.PrefixStore(ROOT, store), "training/0", 600.0)  # it has no roster yet
    assert newcomer.lost(["a.1", "b.1"]) == []
    for member in pair:
        member.leave("its loop has ended")
    look(newcomer)
    assert newcomer.lost(["a.1", "b.1"]) == ["a.1", "b.1"]
    newcomer.leave("")


def test_stale_keys_are_deleted_behind_the_worker(pair, store: dist.TCPStore) -> None:
    one, _ = pair
    registry = StoreRegistry(dist.PrefixStore("training/0", dist.PrefixStore(ROOT, store)), one.stale)
    registry.set("decision", "old")
    registry.delete("decision")
    assert registry.get("decision").result() == "old"
    look(one)
    assert registry.get("decision").result() is None


def test_closed_epoch_is_seen(pair) -> None:
    one, other = pair
    block_on(_close(other))
    assert not one.is_broken()
    look(one)
    assert one.is_broken()
    one.watch(Roster(2, ("a.1", "b.1")))
    assert not one.is_broken(), "another epoch"


async def _close(worker: Heartbeat) -> None:
    await worker._registry.set("closed/1", "why")


def test_worker_that_is_stuck_is_not_waited_for_without_end(pair) -> None:
    one, _ = pair
    one.timeout_s = 0.0
    one.start_waiting()
    assert one.impatient()
    assert one.is_broken()
    assert one.lost(["b.1"]) == [], "it may be slow"
