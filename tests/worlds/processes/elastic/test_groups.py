"""Groups of a roster: an operation that cannot end is ended, and leaves nothing behind."""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from threading import Event, Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist

from offbeat.core.membership import Member
from offbeat.core.pending import block_on
from offbeat.core.port import Lane
from offbeat.core.roster import Roster
from offbeat.worlds.processes.elastic.groups import RosterGroups, close_group, discard
from offbeat.worlds.processes.elastic.registry import StoreRegistry
from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes


class Opinion:
    """A heartbeat that says what the test wants."""

    def __init__(self) -> None:
        self.broken = False
        self.stale = deque[str]()

    def watch(self, roster: Roster) -> None: ...

    def start_waiting(self) -> None: ...

    def impatient(self) -> bool:
        return False

    def lost(self, names: Any) -> list[str]:
        return []

    def is_broken(self) -> bool:
        return self.broken


def connected(
    names: tuple[str, ...], lane: Lane = Lane.FRONT, store: Any = None
) -> list[tuple[RosterGroups, Opinion]]:
    """Groups of several workers, on threads of this process, with this lane open."""
    store = store or dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made: list[tuple[RosterGroups, Opinion]] = []
    threads = []
    for name in names:
        own: Any = dist.PrefixStore("training", store.clone())
        opinion: Any = Opinion()
        member = Member(name, StoreRegistry(own), opinion)
        member.roster = Roster(1, names)
        made.append((RosterGroups(member, own, opinion, HANG_S), opinion))
        threads.append(Thread(target=lambda groups=made[-1][0]: block_on(_open(groups, names, lane))))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


async def _open(groups: RosterGroups, names: tuple[str, ...], lane: Lane) -> None:
    assert await groups.connect(Roster(1, names))
    assert groups.is_open(lane) or await groups.open(lane)


def test_only_the_lane_that_is_used_has_a_group() -> None:
    """Another one would cost every worker as many connections again after each death."""
    workers = connected(("a", "b"), Lane.BACK)
    for groups, _ in workers:
        assert groups.is_open(Lane.BACK) and not groups.is_open(Lane.FRONT)
        assert groups.of(Lane.FRONT) is None
        groups.disconnect()
        assert not groups.is_open(Lane.BACK)


def test_what_groups_wrote_into_the_store_is_deleted_even_that_of_one_who_died() -> None:
    """Else the store would grow by some 100 kB at every death of one of eight workers."""
    names = ("a", "b", "c")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    workers = connected(names, store=store)
    keys = [f"group/1/{Lane.FRONT.value}/0/{rank}" for rank in range(len(names))]
    assert store.check([f"training/{key}" for key in keys]), "gloo's own names"
    for groups, opinion in workers[:-1]:
        groups.disconnect()
        assert not opinion.stale, "one who connects late may not have read them yet"
        groups.disconnect()
    stale = {key for _, opinion in workers for key in opinion.stale}
    assert stale == set(keys), "that of c, too, who has died"
    close_group(workers[-1][0].of(Lane.FRONT))


def test_nobody_waits_for_a_group_that_is_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took all of eight workers 60 ms at every death and every return: up to 10 for each connection."""
    workers = connected(("a", "b"))
    gate, ended = Event(), Event()

    def slowly(held: list[Any]) -> None:
        gate.wait(HANG_S)
        discard(held)
        ended.set()

    monkeypatch.setattr("offbeat.worlds.processes.elastic.groups.discard", slowly)
    workers[0][0].disconnect()
    assert not ended.is_set() and workers[0][0].of(Lane.FRONT) is None
    gate.set()
    workers[0][0].wait_for_discarded()
    assert ended.is_set()
    workers[1][0].disconnect()


def test_operation_that_waits_for_a_lost_worker_is_ended() -> None:
    """Rank 2 never comes: it is stopped, its connections stand. Its group would wait for an hour."""
    workers = connected(("a", "b", "c"))
    tensors = [torch.ones(1000) for _ in workers]
    pairs = zip(workers[:2], tensors, strict=False)
    works = [groups.of(Lane.FRONT).allreduce([tensor]) for (groups, _), tensor in pairs]
    for _, opinion in workers:
        opinion.broken = True
    for (groups, _), work in zip(workers, works, strict=False):
        assert not groups.wait(work)
        assert not work.is_completed()
        groups.disconnect()
        groups.wait_for_discarded()
        assert work.is_completed(), "nothing writes into its tensor any more"
        assert groups.of(Lane.FRONT) is None
    workers[2][0].disconnect()


def test_operation_is_ended_although_others_have_closed_their_connections_already() -> None:
    """Rank 1 is stopped. Rank 0 closes first, so rank 2 cannot even wait for it any more."""
    workers = connected(("a", "b", "c"))
    works = [workers[rank][0].of(Lane.FRONT).allreduce([torch.ones(1000)]) for rank in (0, 2)]
    workers[0][0].disconnect()
    workers[0][0].wait_for_discarded()
    with pytest.raises(RuntimeError):
        workers[2][0].of(Lane.FRONT).recv([torch.empty(1)], 0, 1).wait(timedelta(seconds=HANG_S))
    workers[2][0].disconnect()
    workers[2][0].wait_for_discarded()
    assert all(work.is_completed() for work in works)
    workers[1][0].disconnect()


def test_operation_of_all_ends_well_even_if_a_worker_is_lost_meanwhile() -> None:
    workers = connected(("a", "b"), Lane.BACK)
    tensors = [torch.full((1000,), float(number)) for number in range(2)]
    pairs = zip(workers, tensors, strict=True)
    works = [groups.of(Lane.BACK).allreduce([tensor]) for (groups, _), tensor in pairs]
    for (groups, _), work in zip(workers, works, strict=True):
        assert groups.wait(work)
    assert all(bool((tensor == 1.0).all()) for tensor in tensors)
    for groups, _ in workers:
        groups.disconnect()


def test_roster_of_one_has_no_group() -> None:
    ((groups, _),) = connected(("a",))
    assert groups.of(Lane.FRONT) is None
    assert groups.is_open(Lane.FRONT) and groups.is_open(Lane.BACK)


def test_death_goes_round_as_everyone_closes_its_connections() -> None:
    """Worker d dies. Only one of the others receives from it; the next learns it from that one, and so on."""
    workers = connected(("a", "b", "c", "d"))
    ended: list[bool] = []

    def exchange(groups: RosterGroups) -> None:
        ended.append(groups.wait(groups.of(Lane.FRONT).allreduce([torch.ones(1000)])))
        groups.disconnect()

    workers[3][0].disconnect()
    threads = [Thread(target=exchange, args=(groups,), daemon=True) for groups, _ in workers[:3]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert ended == [False] * 3


def test_connecting_ends_when_a_worker_is_lost_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The constructor of a group would wait for half a minute, for each of the workers."""
    goes_on, closed = Event(), Event()

    class Late:
        def __init__(self, *place: Any) -> None:
            assert goes_on.wait(HANG_S)

        def size(self) -> int:
            closed.set()
            return 0

    monkeypatch.setattr(dist, "ProcessGroupGloo", Late)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    opinion: Any = Opinion()
    opinion.broken = True
    groups = RosterGroups(Member("a", StoreRegistry(store), opinion), store, opinion, HANG_S)
    assert groups.make_group("group", ("a", "b")) is None
    assert not closed.is_set()
    goes_on.set()
    assert closed.wait(HANG_S), "a group that nobody has waited for stays open"


def test_exchange_with_a_worker_that_is_known_to_be_lost_is_not_waited_for() -> None:
    """A death in the middle of a round is known when the round ends: then all redo its exchange at once."""

    class Unending:
        def is_completed(self) -> bool:
            return False

        def wait(self, patience: timedelta) -> None:
            raise AssertionError("waited for a worker that is lost")

    store = dist.HashStore()
    opinion: Any = Opinion()
    opinion.broken = True
    groups = RosterGroups(Member("a", StoreRegistry(store), opinion), store, opinion, HANG_S)
    assert not groups.wait(Unending())


def test_closing_a_group_tries_no_further_worker_once_all_connections_are_closed() -> None:
    """Every try is an error that gloo describes at length: those of 8 workers took a tenth of a second."""
    workers = connected(("a", "b", "c", "d"))
    group = workers[0][0].of(Lane.FRONT)
    tried: list[int] = []

    class Counted:
        size, rank = group.size, group.rank

        def recv(self, tensors: Any, peer: int, tag: int) -> Any:
            tried.append(peer)
            return group.recv(tensors, peer, tag)

    work = group.allreduce([torch.ones(1000)])
    close_group(Counted())
    assert tried == [1] and work.is_completed()
    for groups, _ in workers:
        groups.disconnect()
