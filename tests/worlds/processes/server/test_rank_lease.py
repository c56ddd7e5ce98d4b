"""Leases of ranks: as long as there are N workers, each of N parts of the data has one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from offbeat.worlds.processes.server import rank_lease
from offbeat.worlds.processes.server.rank_lease import WORKER, RankLease
from offbeat.worlds.processes.store import DeadlineStore
from tests.support.limits import HANG_S, SILENCE_S

pytestmark = pytest.mark.processes


@pytest.fixture
def store() -> DeadlineStore:
    return DeadlineStore(dist.HashStore())


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(rank_lease, "LEASE_S", 0.3)  # nobody counts in these tests unless it is said
    monkeypatch.setattr(rank_lease, "BEAT_S", 1000.0)
    yield


def die(lease: RankLease) -> None:
    """End without a word: it counts no more, and has not given its rank back."""
    lease._ended.set()


def test_the_first_workers_get_a_rank_each(store: DeadlineStore) -> None:
    leases = [RankLease(store, worker, 3) for worker in range(3)]
    assert [lease.rank for lease in leases] == [0, 1, 2]


def test_a_rank_that_was_given_back_is_the_next_workers(store: DeadlineStore) -> None:
    leases = [RankLease(store, worker, 3) for worker in range(3)]
    leases[1].release()
    leases[1].release()
    assert RankLease(store, 3, 3).rank == 1


def test_one_who_replaces_a_dead_worker_gets_its_part(
    store: DeadlineStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number, modulo 3, would be 0: another's part, and the dead one's would go untrained."""
    monkeypatch.setattr(rank_lease, "BEAT_S", 0.02)
    monkeypatch.setattr(rank_lease, "LEASE_S", SILENCE_S)
    leases = [RankLease(store, worker, 3) for worker in range(3)]
    die(leases[2])
    assert RankLease(store, 3, 3).rank == 2
    for lease in leases[:2]:
        lease.release()


def test_two_who_come_for_one_rank_do_not_both_get_it(store: DeadlineStore) -> None:
    dead = RankLease(store, 0, 1)
    die(dead)
    assert RankLease(store, 1, 1)._replace(0, dead._holder, "too late") is False


def test_a_worker_with_a_name_gets_its_former_rank_at_once(
    store: DeadlineStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_lease, "LEASE_S", 1000.0)  # nobody waits for it
    for worker, name in enumerate(("a", "b", "c")):
        monkeypatch.setenv(WORKER, name)
        assert RankLease(store, worker, 3).rank == worker
    monkeypatch.setenv(WORKER, "b")
    assert RankLease(store, 7, 3).rank == 1


def test_more_workers_than_parts_share_them(store: DeadlineStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_lease, "BEAT_S", 0.02)
    monkeypatch.setattr(rank_lease, "LEASE_S", HANG_S)  # until all have counted
    leases = [RankLease(store, worker, 2) for worker in range(2)]
    assert RankLease(store, 3, 2).rank == 1
    for lease in leases:
        lease.release()
