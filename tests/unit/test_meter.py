"""The meter: what workers know of each other's speed, with what a port tells as data."""

from __future__ import annotations

from typing import Any

import torch

from offbeat.meter import EVERY, Meter
from offbeat.port import Arrived, Spent, block_on


class Alone:
    """A port of one worker, whose clocks are set by hand."""

    def __init__(self) -> None:
        self.told = Spent(0.0, 0.0, 0)

    def spent(self) -> Spent:
        return self.told

    def reduce(self, tensor: torch.Tensor, *_: Any) -> Arrived[torch.Tensor]:
        return Arrived(tensor)


def run(paces: list[float], nbytes: int = 100, communicate_s: float = 0.5) -> Meter:
    port, meter = Alone(), Meter()
    for pace in paces:
        before = port.told
        port.told = Spent(
            before.compute_s + pace, before.communicate_s + communicate_s, before.nbytes + nbytes
        )
        block_on(meter.read(port, torch.zeros(1, dtype=torch.float64)))  # type: ignore[arg-type]
    return meter


def test_it_measures_a_step_and_a_link() -> None:
    meter = run([2.0] * (2 * EVERY + 3))
    assert (meter.compute_s, meter.bytes_per_s) == (2.0, 200.0)


def test_a_loop_that_pauses_is_not_a_slow_worker() -> None:
    paces = [2.0] * (3 * EVERY + 3)
    paces[EVERY // 2 :: EVERY] = [1000.0] * len(paces[EVERY // 2 :: EVERY])
    assert run(paces).compute_s == 2.0


def test_a_worker_that_turns_slow_is_believed_by_half() -> None:
    meter = run([2.0] * (EVERY + 2) + [4.0] * (EVERY + 1))
    assert meter.compute_s == 3.0
