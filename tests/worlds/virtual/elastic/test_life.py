"""What a hang, a cut and an end do to a process, and when others find out."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import pytest

from offbeat.worlds.virtual.elastic.life import Life, Lives, VirtualDetector
from offbeat.worlds.virtual.elastic.registry import SharedRegistry, VirtualRegistry
from offbeat.worlds.virtual.network import Network
from offbeat.worlds.virtual.outages import ElasticTimes
from offbeat.worlds.virtual.scheduler import Scheduler
from tests.support.virtual_runs import cluster_of

pytestmark = pytest.mark.virtual

TIMES = ElasticTimes(death_s=0.5, silence_s=2.0, timeout_s=10.0)


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler(Network(cluster_of(1.0, 1.0)))


@pytest.fixture
def lives(scheduler: Scheduler) -> Lives:
    return Lives(scheduler, TIMES)


def run(scheduler: Scheduler, code: Coroutine[Any, None, Any], *events: tuple[float, Any]) -> None:
    for time_s, action in events:
        scheduler.at(time_s, action)
    scheduler.spawn("worker", code)
    scheduler.run()


async def work(life: Life, until_s: float, ended: list[float]) -> None:
    await life.sleep(until_s)
    ended.append(life.now)


@pytest.mark.parametrize(
    ("hangs", "expected"),
    [
        ([], 5.0),
        ([(1.0, 0.5)], 5.5),  # over before the work ends
        ([(4.0, 3.0)], 8.0),  # while the work would have ended
        ([(4.0, 3.0), (7.5, 1.0)], 9.0),  # and again in what was left
        ([(5.5, 3.0)], 5.0),  # too late to matter
    ],
)
def test_work_takes_longer_by_as_long_as_its_process_hangs(
    scheduler: Scheduler, lives: Lives, hangs: list[tuple[float, float]], expected: float
) -> None:
    life, ended = lives.begin(0), []
    events = [(at, lambda seconds=seconds: life.hang(seconds)) for at, seconds in hangs]
    run(scheduler, work(life, 5.0, ended), *events)
    assert ended == [expected]


def test_cut_does_not_stop_work_but_calls_to_the_store(scheduler: Scheduler, lives: Lives) -> None:
    life, ended = lives.begin(0), []
    registry = VirtualRegistry(SharedRegistry(), life)

    async def code() -> None:
        await work(life, 2.0, ended)
        await registry.set("key", "text")
        ended.append(life.now)

    run(scheduler, code(), (1.0, lambda: life.cut(5.0)))
    assert ended == [2.0, 6.0]


def test_silence_is_known_after_a_while_and_an_end_when_it_is_told(
    scheduler: Scheduler, lives: Lives
) -> None:
    one, other = lives.begin(0), lives.begin(1)
    seen: dict[float, bool] = {}
    look = [1.4, 1.5, 2.9, 3.0, 6.0, 6.1]

    async def code() -> None:
        for time_s in look:
            await one.sleep(time_s)
            seen[time_s] = one.sees_lost(other)

    run(scheduler, code(), (1.0, lambda: other.hang(3.0)), (5.6, lambda: other.end(0.5)))
    assert seen == {1.4: False, 1.5: False, 2.9: False, 3.0: True, 6.0: False, 6.1: True}


def test_one_that_was_stopped_itself_does_not_take_others_for_lost(
    scheduler: Scheduler, lives: Lives
) -> None:
    """Both hang; the one that goes on first begins to count the other's silence then."""
    one, other = lives.begin(0), lives.begin(1)
    seen: list[bool] = []

    async def code() -> None:
        for time_s in (1.5, 5.9, 6.0):  # the first is reached at 4.5
            await one.sleep(time_s)
            seen.append(one.sees_lost(other))

    run(scheduler, code(), (1.0, lambda: one.hang(3.0)), (1.0, lambda: other.hang(9.0)))
    assert seen == [False, False, True]


def test_paused_worker_wakes_up_when_a_key_that_it_has_read_changes(
    scheduler: Scheduler, lives: Lives
) -> None:
    one, other = lives.begin(0), lives.begin(1)
    shared = SharedRegistry()
    own, others = VirtualRegistry(shared, one), VirtualRegistry(shared, other)
    woken: list[tuple[float, str | None]] = []

    async def write() -> None:
        for time_s, key in ((1.0, "another"), (2.0, "mine")):
            await other.sleep(time_s)
            await others.set_once(key, "text")

    async def code() -> None:
        while not woken or woken[-1][1] is None:
            text = await own.get("mine")
            woken.append((one.now, text))
            if text is None:
                await own.pause()

    scheduler.spawn("writer", write())
    run(scheduler, code())
    assert woken == [(0.0, None), (2.0, "text")]


def test_patience_ends(scheduler: Scheduler, lives: Lives) -> None:
    life = lives.begin(0)
    registry = VirtualRegistry(SharedRegistry(), life)
    detector = VirtualDetector(life, lives, registry)
    tired: list[float] = []

    async def code() -> None:
        for _ in range(2):
            detector.start_waiting()
            while not detector.impatient():
                await registry.pause()
            tired.append(life.now)
            await life.sleep(life.now + 1.0)

    run(scheduler, code())
    assert tired == [10.0, 21.0]
