"""The registry in virtual time: who waits wakes up in time, and who is cut off waits."""

from __future__ import annotations

import pytest

from offbeat.worlds.virtual.elastic.registry import SharedRegistry, VirtualRegistry
from tests.support.lives import lives_of, run, work

pytestmark = pytest.mark.virtual


def test_cut_does_not_stop_work_but_calls_to_the_store() -> None:
    lives, (life,) = lives_of(1)
    ended: list[float] = []
    registry = VirtualRegistry(SharedRegistry(), life)

    async def code() -> None:
        await work(life, 2.0, ended)
        await registry.set("key", "text")
        ended.append(life.now)

    run(lives, code(), (1.0, lambda: life.cut(5.0)))
    assert ended == [2.0, 6.0]


def test_paused_worker_wakes_up_when_a_key_that_it_has_read_changes() -> None:
    lives, (one, other) = lives_of(2)
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

    lives.scheduler.spawn("writer", write())
    run(lives, code())
    assert woken == [(0.0, None), (2.0, "text")]
