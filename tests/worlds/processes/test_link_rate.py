"""The rate of the links between ranks: on a port whose all-reduces take stated times."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain, repeat

import pytest
import torch
from torch import Tensor

from offbeat.core.pending import Arrived, Pending
from offbeat.core.port import Lane, Signature
from offbeat.worlds.processes.link_rate import MOST_BYTES, REPEATS, SMALLER, measure_link_rate
from tests.support.lone_port import NotingPort

CPU = torch.device("cpu")
MODEL = 10 * MOST_BYTES


class TimedPort(NotingPort):
    """A port whose all-reduces take a latency, what their bytes take in a ring, and a disturbance each."""

    def __init__(self, world: int, bytes_per_s: float, disturbed_s: Sequence[float] = ()) -> None:
        super().__init__(world=world)
        self.bytes_per_s = bytes_per_s
        self.now_s = 0.0
        self.disturbed_s: Iterator[float] = chain(disturbed_s, repeat(0.0))

    def clock(self) -> float:
        return self.now_s

    def all_reduce(self, tensor: Tensor, op: object = None, lane: Lane = Lane.FRONT) -> Pending[Tensor]:
        self.started.append((Signature("all_reduce", str(op), (tensor.nbytes,)), lane))
        self.now_s += 1 / 256 + 2 * (self.world - 1) / self.world * tensor.nbytes / self.bytes_per_s
        self.now_s += next(self.disturbed_s)
        self.ledger.sent(tensor.nbytes)
        return Moment(tensor)


class Moment(Arrived[Tensor]):
    def wait(self) -> None:
        """It is there."""


@pytest.mark.parametrize("world", [2, 4, 100])
@pytest.mark.parametrize("bytes_per_s", [1e6, 25e6, 1.25e9])
def test_latency_does_not_count(world: int, bytes_per_s: float) -> None:
    port = TimedPort(world, bytes_per_s)
    assert measure_link_rate(port, CPU, MODEL, port.clock) == pytest.approx(bytes_per_s, rel=1e-6)


def test_a_first_connection_and_a_disturbed_repeat_do_not_count() -> None:
    port = TimedPort(4, 25e6, [3.0, 0, 0.5, 0, 0, 0.5, 0])
    assert measure_link_rate(port, CPU, MODEL, port.clock) == pytest.approx(25e6, rel=1e-6)


@pytest.mark.parametrize(("model", "large"), [(MODEL, MOST_BYTES), (1 << 18, 1 << 18)])
def test_no_more_is_sent_than_the_model_has(model: int, large: int) -> None:
    port = TimedPort(4, 25e6)
    measure_link_rate(port, CPU, model, port.clock)
    sizes = [nbytes for signature, _ in port.started for nbytes in signature.nbytes]
    assert sizes == [4, *[large // SMALLER] * REPEATS, *[large] * REPEATS]


def test_the_ledger_counts_nothing() -> None:
    port = TimedPort(4, 25e6)
    port.ledger.start()
    measure_link_rate(port, CPU, MODEL, port.clock)
    assert port.ledger.totals().bytes_sent == 0


@pytest.mark.parametrize(("world", "bytes_per_s"), [(1, 25e6), (4, math.inf)], ids=["alone", "no limit"])
def test_where_nothing_is_in_the_way_it_is_infinite(world: int, bytes_per_s: float) -> None:
    port = TimedPort(world, bytes_per_s)
    assert measure_link_rate(port, CPU, MODEL, port.clock) == math.inf
    assert bool(port.started) == (world > 1)
