"""Transfers that none slows down: taken out as they end or meet another, and exact to the bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offbeat.worlds.virtual.cluster import Cluster, Site
from offbeat.worlds.virtual.flow import Landing, Transfer, _Start
from offbeat.worlds.virtual.network import Network
from offbeat.worlds.virtual.solos import Flow, Solos
from tests.support.networks import workers

pytestmark = pytest.mark.virtual
NODES = 6


def flow(*links: int, load: float = 1.0) -> Flow:
    return Flow(tuple((link, load) for link in links), alone_s=1.0)


def test_they_are_taken_out_as_they_end() -> None:
    solos: Solos[str] = Solos(np.ones(6))
    solos.add(flow(0, 1), 3.0, 1, "late")
    solos.add(flow(2, 3), 2.0, 2, "early")
    solos.add(flow(4, 5), 2.0, 3, "early, too")
    assert solos.first_end_s == 2.0
    assert solos.take_ended(1.9) == []
    assert solos.take_ended(2.0) == ["early", "early, too"]
    assert solos.first_end_s == 3.0
    assert solos.take_all() == ["late"]
    assert solos.first_end_s == math.inf


def test_they_are_taken_out_when_another_comes() -> None:
    solos: Solos[str] = Solos(np.array([1.0, 1.0, 1.0, 1.0, 9.0, 9.0, 1.0]))
    solos.add(flow(0, 1), 1.0, 1, "met on two links")
    solos.add(flow(2, 4), 3.0, 2, "not met")
    solos.add(flow(3, 4), 2.0, 3, "shares a link with that")
    assert solos.take_met([1, 0, 6]) == ["met on two links"]
    assert solos.first_end_s == 2.0, "the end of one that was taken out is forgotten"
    assert solos.take_met([2]) == ["not met", "shares a link with that"]


def test_a_link_has_room_until_it_could_be_full() -> None:
    solos: Solos[str] = Solos(np.array([1.0, 1.0, 1.0, 2.5]))
    assert solos.have_room(flow(0, 3)), "alone, a transfer may fill a link"
    solos.add(flow(0, 3), 1.0, 1, "first")
    assert not solos.have_room(flow(0)), "its own link is full"
    assert solos.have_room(flow(1, 3)), "2 of 2.5"
    solos.add(flow(1, 3), 2.0, 2, "second")
    assert not solos.have_room(flow(2, 3)), "3 of 2.5"
    assert solos.take_ended(1.0) == ["first"]
    assert solos.have_room(flow(2, 3))
    assert not solos.have_room(flow(3, load=1.5)), "exactly full is too full: rounding could decide"


class TogetherNetwork(Network):
    """A network in which no transfer is kept apart."""

    def _begin(self, start: _Start) -> None:
        self._starting.append(start)


Sent = tuple[float, list[tuple[int, int, int]]]  # when, and of each message: from, to, bytes
times = st.sampled_from([0.0, 0.25, 0.3, 1.0, 1.1, 1.7, 2.0, 3.5])
messages = st.lists(
    st.tuples(st.integers(0, NODES - 1), st.integers(0, NODES - 1), st.sampled_from([0, 1, 7, 64, 300]))
    .filter(lambda sent: sent[0] != sent[1]),
    min_size=1,
    max_size=3,
)  # fmt: skip


def log_of(network: Network, starts: list[Sent]) -> list[tuple[float, object]]:
    """Run all to the end; return what arrives, and when."""
    waiting = sorted(starts, key=lambda start: start[0])
    arrived: list[tuple[float, object]] = []
    while True:
        event = network.next_event()
        if waiting and (event is None or waiting[0][0] <= event):
            now_s, sent = waiting.pop(0)
            number = len(waiting)
            if number % 4 == 3:  # in between, one that may be long and wide
                network.start(now_s, network.ring_all_reduce(100, range(NODES - 1)))
            bundle = network.messages(
                tuple((source, target) for source, target, _ in sent), tuple(nbytes for *_, nbytes in sent)
            ).bundle
            network.start_all(now_s, bundle, lambda parts, number=number: arrived.append((number, parts)))  # type: ignore[misc]
        elif event is not None:
            for each in network.advance(event):
                if isinstance(each, Landing):
                    each.landed(each.parts)
                    arrived[-1] = (event, arrived[-1])
                else:
                    assert isinstance(each, Transfer)
                    arrived.append((event, each.nbytes))
        else:
            return arrived


@settings(max_examples=60, deadline=None)
@example([(0.0, [(0, 1, 64)]), (0.0, [(1, 0, 64)])])  # two that end together
@given(st.lists(st.tuples(times, messages), min_size=1, max_size=12))
def test_every_arrival_is_the_same_to_the_bit(starts: list[Sent]) -> None:
    slow, fast = workers(3, mbytes_per_s=1e-4, site="a"), workers(2, mbytes_per_s=3e-4, site="b")
    wide = workers(1, mbytes_per_s=1e-3, site="b")  # has room for several of the others
    sites = (Site(name="a", up_bits_per_s=1100.0), Site(name="b"))
    cluster = Cluster(workers=(slow, fast, wide), sites=sites)
    assert log_of(Network(cluster), starts) == log_of(TogetherNetwork(cluster), starts)


def test_rows_are_in_order_of_start_when_one_was_alone() -> None:
    """Sums of speeds depend on the order of the rows, in the last bit."""
    network = Network(Cluster(workers=(workers(NODES, mbytes_per_s=1e-4),)))
    for source, target in ((0, 1), (2, 3), (2, 4), (0, 5)):  # the last one meets the first
        network.start(0.0, network.send(source, target, 300))
        network.next_event()  # so that rows are added one by one
    assert network._rows["order"].tolist() == [1, 2, 3, 4]
    assert network._row.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert network.load()[:NODES].tolist() == [100.0, 0.0, 100.0, 0.0, 0.0, 0.0]
