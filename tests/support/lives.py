"""Processes of elastic workers in virtual time, without training."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from offbeat.worlds.virtual.elastic.life import Life, Lives
from offbeat.worlds.virtual.network import Network
from offbeat.worlds.virtual.outages import ElasticTimes
from offbeat.worlds.virtual.scheduler import Scheduler
from tests.support.virtual_runs import cluster_of

TIMES = ElasticTimes(death_s=0.5, silence_s=2.0, timeout_s=10.0)


def lives_of(workers: int) -> tuple[Lives, list[Life]]:
    """Return the living processes of so many workers, on links of 1 MB/s."""
    lives = Lives(Scheduler(Network(cluster_of(*[1.0] * workers))), TIMES)
    return lives, [lives.begin(rank) for rank in range(workers)]


def run(lives: Lives, code: Coroutine[Any, None, Any], *events: tuple[float, Any]) -> None:
    """Run a process to its end, and actions at their times."""
    for time_s, action in events:
        lives.scheduler.at(time_s, action)
    lives.scheduler.spawn("worker", code)
    lives.scheduler.run()


async def work(life: Life, until_s: float, ended: list[float]) -> None:
    """Work until a time, and note when it ended."""
    await life.sleep(until_s)
    ended.append(life.now)
