"""Auto's meter: which numbers all workers agree on, and what counts in a window."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from offbeat.core.port import Port, Usage
from offbeat.core.replica import Replica
from offbeat.strategies.auto.meter import Meter
from offbeat.strategies.auto.model import WindowSeconds
from tests.support.exchanges import equal_workers, virtually

pytestmark = pytest.mark.virtual


def used(compute_s: float, wait_s: float, exchange_s: float) -> Usage:
    return Usage(compute_s, exchange_s, 0, wait_s=wait_s)


async def agreed(port: Port, seen: list[list[tuple[Usage, bool]]], fit: list[bool]) -> list[Tensor]:
    meter = Meter()
    for usage, exchanged in seen[port.rank]:
        meter.add(usage, exchanged)
    assert await meter.receive() is None
    replica = Replica(nn.Linear(2, 2))
    await meter.send(port, replica, fit[port.rank])
    assert (meter.steps, meter.compute_s, meter.wait_s, meter.exchange_s) == (0, 0.0, 0.0, math.inf)
    await meter.drain()
    known = await meter.receive()
    assert known is not None
    return [torch.tensor([float(number) for number in known], dtype=torch.float64)]


def together(*seen: list[tuple[Usage, bool]], fit: tuple[bool, ...] = (True, True)) -> list[WindowSeconds]:
    made = virtually(agreed, equal_workers(len(seen)), list(seen), list(fit))
    numbers = [tensors[0].tolist() for tensors, _ in made]
    return [WindowSeconds(*each[:4], fit=bool(each[4])) for each in numbers]


FIRST = (used(0.0, 0.0, 0.0), True)


def test_the_slowest_worker_and_the_fastest_exchange_count_on_all() -> None:
    """By step, worker 0 computes for 1 and 3 s, and worker 1 for 4; the exchange takes 2 s at best."""
    ours = [FIRST, (used(1.0, 3.0, 5.0), True), (used(4.0, 4.0, 8.0), True)]
    theirs = [FIRST, (used(4.0, 0.5, 2.0), True), (used(8.0, 1.0, 6.0), True)]
    assert together(ours, theirs) == [WindowSeconds(4.0, 2.0, 0.5, 2.0)] * 2


def test_a_step_without_an_exchange_says_nothing_about_exchanges() -> None:
    seen = [FIRST, (used(1.0, 0.0, 0.0), False), (used(2.0, 1.0, 1.0), True)]
    assert together(seen, seen) == [WindowSeconds(1.0, 1.0, 0.5, 1.0)] * 2


def test_the_first_step_after_a_restart_is_not_measured() -> None:
    (known, _) = together([FIRST], [FIRST, (used(1.0, 1.0, 1.0), True)])
    assert not known.known


def test_one_worker_that_is_not_fit_is_enough() -> None:
    seen = [FIRST, (used(1.0, 1.0, 1.0), True)]
    assert [each.fit for each in together(seen, seen, fit=(True, False))] == [False, False]
