"""A store with deadlines: reset connections heal, and silence ends in RankLost, never in a hang."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from offbeat.errors import RankLost
from offbeat.worlds.processes import store as store_module
from offbeat.worlds.processes.failure import FailureDetector
from offbeat.worlds.processes.metrics_store import MetricsStore
from offbeat.worlds.processes.store import LONGEST_PAUSE_S, DeadlineStore, wait_for
from tests.support.limits import HANG_S
from tests.support.proxy import Proxy

pytestmark = pytest.mark.processes

SOON_S = 0.3  # for what is certain not to come


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def proxy(server: dist.TCPStore) -> Iterator[Proxy]:
    proxy = Proxy("127.0.0.1", server.port)
    yield proxy
    proxy.forward()
    proxy.close()


@pytest.fixture
def store(proxy: Proxy) -> DeadlineStore:
    timeout = timedelta(seconds=HANG_S)
    client = dist.TCPStore("127.0.0.1", proxy.port, is_master=False, wait_for_workers=False, timeout=timeout)
    return DeadlineStore(dist.PrefixStore("run", client), HANG_S)


def test_a_store_keeps_what_it_is_given(store: DeadlineStore, server: dist.TCPStore) -> None:
    store.set("a", "1")
    assert store.get("a") == b"1" == server.get("run/a")
    assert (store.check(["a"]), store.check(["a", "b"])) == (True, False)
    assert [store.add("count", 2), store.add("count", 3)] == [2, 5]
    assert store.compare_set("c", "", "mine") == b"mine"
    assert store.compare_set("c", "", "yours") == b"mine"
    inner = store.prefixed("x").prefixed("y")
    inner.set("z", "deep")
    assert server.get("run/x/y/z") == b"deep"
    assert store.wait(["a", "c"], HANG_S)
    assert not store.wait(["never"], SOON_S)


def test_a_reset_connection_heals(store: DeadlineStore, proxy: Proxy) -> None:
    store.set("a", "1")
    for again in range(3):
        proxy.reset()
        assert store.get("a") == b"1", f"after reset {again + 1}"
    proxy.reset()
    store.set("a", "2")
    assert store.get("a") == b"2"


@pytest.mark.parametrize("call", ["set", "get", "add", "check", "compare_set"])
def test_silence_ends_at_the_deadline_and_heals(store: DeadlineStore, proxy: Proxy, call: str) -> None:
    store.set("a", "1")
    proxy.swallow()
    quick = store.within(SOON_S)
    calls = {
        "set": lambda: quick.set("a", "2"),
        "get": lambda: quick.get("a"),
        "add": lambda: quick.add("n", 1),
        "check": lambda: quick.check(["a"]),
        "compare_set": lambda: quick.compare_set("c", "", "1"),
    }
    with pytest.raises(RankLost, match="the rendezvous store could not be reached for 0 s"):
        calls[call]()
    proxy.forward()
    proxy.reset()  # what was swallowed is not delivered later
    store.set("b", "2")
    assert store.get("b") == b"2"


def test_a_key_that_nobody_sets_ends_in_an_error(store: DeadlineStore) -> None:
    with pytest.raises(RankLost, match="the other processes have not set 'nothing'"):
        store.within(SOON_S).get("nothing")


def test_a_rank_that_is_cut_off_learns_it_within_its_timeout(store: DeadlineStore, proxy: Proxy) -> None:
    failures = FailureDetector(store, 0, 2, timeout_s=SOON_S)
    assert failures.check(1) is None
    proxy.swallow()
    lost = failures.check(2)
    assert isinstance(lost, RankLost) and "could not be reached" in str(lost)
    with pytest.raises(RankLost):
        failures.leave(3, "")
    with pytest.raises(RankLost):
        failures.wait_for_exit(SOON_S)


def test_a_rank_whose_results_do_not_come_is_named() -> None:
    with pytest.raises(RankLost, match="rank 1, 2 has not reported its results within 0 s"):
        MetricsStore(dist.HashStore(), 0, 3).gather_json(1, SOON_S)


class Clock:
    """A clock that only sleeps and looks move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append(seconds)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(store_module, "time", clock)
    return clock


@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.1, 3.0])
def test_what_comes_is_seen_soon_and_looked_for_seldom(clock: Clock, after_s: float) -> None:
    """It is seen after at most half as long again as it took; and a wait of seconds has few looks."""
    assert wait_for(lambda: clock.now >= after_s and "there", 10.0) == "there"
    assert clock.now <= after_s + max(0.002, min(LONGEST_PAUSE_S, after_s / 2))
    assert len(clock.pauses) <= 13 + after_s / LONGEST_PAUSE_S


def test_a_wait_ends_with_its_patience(clock: Clock) -> None:
    assert not wait_for(lambda: False, 1.0)
    assert 1.0 < clock.now <= 1.0 + LONGEST_PAUSE_S


def test_looks_that_take_long_leave_time_to_others(clock: Clock) -> None:
    def look() -> bool:
        clock.now += 0.05
        return clock.now > 0.4

    assert wait_for(look, 10.0)
    assert all(pause == pytest.approx(0.05) for pause in clock.pauses)
    assert clock.pauses
