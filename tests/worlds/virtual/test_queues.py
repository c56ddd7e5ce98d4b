"""Links with queues: closed forms to the packet, what no link exceeds, and workers that fall into phase."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat import ASP, BSP, SSP
from offbeat.worlds.virtual.cluster import Cluster, Slowdown
from offbeat.worlds.virtual.flow import Landing, Transfer
from offbeat.worlds.virtual.queues import AT_SENDER, LEAST_BYTES, PACKETS, Links, Queues
from tests.support.networks import MB, arrivals, close, network_of, workers
from tests.support.virtual_runs import BYTES_PER_S, AnyStrategy, Kept, cluster_of, play

pytestmark = pytest.mark.virtual

RATE = 100.0 * MB
NBYTES = 16 * MB  # of a message: a packet has a sixteenth of it
PACKET_S = NBYTES / PACKETS / RATE
ALONE_S = NBYTES / RATE
DEEP_S = 1e6  # queues that never overflow

Sent = tuple[float, Links, float]  # when, along which links, how many bytes


def ends_of(
    sent: Sequence[Sent], rates: Sequence[float], queue_s: float = DEEP_S
) -> list[tuple[float, float]]:
    """Send messages in order of time; return when each had left its sender, and when it had arrived."""
    queues, waiting = Queues(rates, queue_s), list(enumerate(sent))
    left, came = {}, {}
    while True:
        event = queues.next_event()
        if waiting and (event is None or waiting[0][1][0] <= event):
            index, (at_s, links, nbytes) = waiting.pop(0)
            queues.send(
                at_s,
                [links],
                [nbytes],
                lambda parts, index=index: left.setdefault(index, queues.now_s),
                lambda parts, index=index: came.setdefault(index, queues.now_s),
            )
        elif event is not None:
            for landing in queues.advance(event):
                assert isinstance(landing, Landing)
                landing.landed(landing.parts)
        else:
            return [(left[index], came[index]) for index in range(len(sent))]


# --- closed forms


def test_a_message_alone_takes_its_time_on_its_slowest_link() -> None:
    for rates in ([RATE, RATE], [RATE, RATE / 10], [RATE / 10, RATE], [RATE, 3 * RATE, RATE / 2]):
        ((left_s, came_s),) = ends_of([(0.5, tuple(range(len(rates))), NBYTES)], rates)
        assert left_s == close(0.5 + NBYTES / rates[0])
        assert came_s == close(0.5 + NBYTES / min(rates))


def test_messages_of_a_sender_take_turns() -> None:
    """Both are done at the end of both; two packets of the one, then two of the other, and so on."""
    first, second = ends_of([(0.0, (0, 1), NBYTES), (0.0, (0, 2), NBYTES)], [RATE] * 3)
    assert first == (close(2 * ALONE_S - AT_SENDER * PACKET_S),) * 2
    assert second == (close(2 * ALONE_S),) * 2


def test_who_comes_first_is_served_first() -> None:
    """Two send to one. When both are half done, a queue of half a message is in front of a third."""
    half_s = ALONE_S / 2
    sent = [(0.0, (0, 3), NBYTES), (0.0, (1, 3), NBYTES), (half_s, (2, 3), LEAST_BYTES)]
    *_, (left_s, came_s) = ends_of(sent, [RATE] * 4)
    own_s = LEAST_BYTES / RATE
    assert left_s == close(half_s + own_s)
    assert came_s == pytest.approx(half_s + half_s + own_s, abs=2 * PACKET_S)
    assert came_s > 5 * own_s + half_s, "not a third of the link at once, as where it is divided evenly"


def test_a_queue_that_is_full_holds_the_senders_up() -> None:
    """A sender that would be done after `ALONE_S` still has all but what the queue holds."""
    sent = [(0.0, (0, 2), NBYTES), (0.0, (1, 2), NBYTES)]
    (deep_s, _), _ = ends_of(sent, [RATE] * 3)
    assert deep_s == close(ALONE_S)
    for queue_s in (4 * PACKET_S, 8 * PACKET_S):
        ends = ends_of(sent, [RATE] * 3, queue_s)
        for left_s, came_s in ends:
            assert 2 * ALONE_S - queue_s - 2 * PACKET_S < left_s
            assert 0 < came_s - left_s <= queue_s + 2 * PACKET_S, "what it waits in the queue"
        assert max(came_s for _, came_s in ends) == close(2 * ALONE_S), "the link was never idle"


def test_even_without_a_queue_a_packet_may_be_in_flight() -> None:
    ((_, came_s),) = ends_of([(0.0, (0, 1), NBYTES)], [RATE] * 2, queue_s=1e-12)
    assert came_s == close(ALONE_S)


@pytest.mark.parametrize("nbytes", [1.0, LEAST_BYTES + 1.0, 7.0 * LEAST_BYTES, 1e9 + 7])
def test_any_number_of_bytes_is_carried(nbytes: float) -> None:
    ((_, came_s),) = ends_of([(0.0, (0, 1), nbytes)], [RATE] * 2)
    assert came_s == close(nbytes / RATE)


def test_what_has_no_bytes_or_no_links_is_there_at_once() -> None:
    assert ends_of([(0.5, (0, 1), 0.0), (0.7, (), 5.0)], [RATE] * 2) == [(0.5, 0.5), (0.7, 0.7)]


def test_rates_change_for_what_is_sent_from_then_on() -> None:
    queues, came = Queues([RATE, RATE], DEEP_S), []
    queues.send(0.0, [(0, 1)], [NBYTES], lambda parts: None, lambda parts: came.append(queues.now_s))
    queues.set_rate(ALONE_S / 2, [0], RATE / 10)
    while (event := queues.next_event()) is not None:
        for landing in queues.advance(event):
            assert isinstance(landing, Landing)
            landing.landed(landing.parts)
    slow_packets = PACKETS // 2 - AT_SENDER  # those that waited keep their times
    assert came == [close(ALONE_S / 2 + (AT_SENDER + 10 * slow_packets) * PACKET_S)]


# --- operations of many nodes


def test_operations_take_what_they_take_on_links_that_are_divided_evenly() -> None:
    even = network_of(workers(4, latency_s=0.001))
    queued = network_of(workers(4, latency_s=0.001), queue_s=0.1)
    assert not even.queue_s
    queues = Queues(queued.bytes_per_s, queued.queue_s)
    for build in (
        lambda network: network.ring_all_reduce(40 * MB, range(4)),
        lambda network: network.tree_all_reduce(4 * MB, range(4)),
        lambda network: network.all_gather([MB, 2 * MB, 3 * MB, 0], range(4)),
        lambda network: network.broadcast(MB, range(4), 1),
    ):
        (expected_s,) = arrivals(even, (even.now_s, build(even))).values()
        (found_s,) = arrivals(queues, (queues.now_s, build(queued))).values()
        assert found_s == close(expected_s)


def test_an_operation_shares_its_links_with_messages() -> None:
    """A ring of four puts 24 MB on each NIC, each way, and a message of 16 MB meets it at two of them."""
    network = network_of(workers(4), queue_s=DEEP_S)
    queues = Queues(network.bytes_per_s, network.queue_s)
    queues.start(0.0, network.ring_all_reduce(16 * MB, range(4)))
    paths = network.messages(((0, 1),), (16 * MB,))
    queues.send(0.0, paths.links, [16.0 * MB], lambda parts: None, lambda parts: None)
    last_s = {}
    while (event := queues.next_event()) is not None:
        for each in queues.advance(event):
            last_s[isinstance(each, Transfer)] = event
    assert max(last_s.values()) == close((24 + 16) / 100), "no link was idle before"
    assert last_s[True] > 1.2 * 24 / 100, "the ring was held up"


def test_a_cancelled_operation_does_not_arrive() -> None:
    network = network_of(workers(4), queue_s=0.1)
    queues = Queues(network.bytes_per_s, network.queue_s)
    ring, other = network.ring_all_reduce(40 * MB, range(4)), network.send(0, 1, 10 * MB)
    queues.start(0.0, ring)
    queues.cancel(0.1, ring)
    queues.cancel(0.1, other)  # one that is not there
    queues.start(0.2, other)
    assert arrivals(queues) == {other: close(0.2 + 0.1)}, "and nothing is in its way"


# --- properties

sizes = st.integers(1, 60_000).map(float)
starts = st.lists(st.tuples(st.floats(0, 0.002), st.integers(0, 3), st.integers(0, 3), sizes), min_size=1)


@given(starts, st.sampled_from([1e-6, 1e-4, 1.0]), st.sampled_from([1e6, 1e8]))
@settings(max_examples=150, deadline=None)
def test_no_link_carries_more_than_it_can(
    found: list[tuple[float, int, int, float]], queue_s: float, slow: float
) -> None:
    """Everything arrives, never sooner than alone; and a link needs its time for all that it carries."""
    rates = [1e8] * 7 + [slow]  # four senders and four receivers
    sent = [(at_s, (source, 4 + target), nbytes) for at_s, source, target, nbytes in sorted(found)]
    ends = ends_of(sent, rates, queue_s)
    assert ends == ends_of(sent, rates, queue_s), "runs repeat to the bit"
    for (at_s, links, nbytes), (left_s, came_s) in zip(sent, ends, strict=True):
        assert left_s <= came_s
        assert came_s >= (at_s + nbytes / min(rates[link] for link in links)) * (1 - 1e-9)
    for link, rate in enumerate(rates):
        on_link = [
            (at_s, nbytes, came_s)
            for (at_s, links, nbytes), (_, came_s) in zip(sent, ends, strict=True)
            if link in links
        ]
        if on_link:
            first_s, _, _ = min(on_link)
            needed_s = sum(nbytes for _, nbytes, _ in on_link) / rate
            assert max(came_s for *_, came_s in on_link) >= (first_s + needed_s) * (1 - 1e-9)


# --- servers

WORLD, FLOATS, COMPUTE_S = 4, 16_000, 0.001
IN_PHASE_S = (WORLD - 1) * 2 * 4 * FLOATS // WORLD / BYTES_PER_S


def pace_s(cluster: Cluster, strategy: AnyStrategy) -> float:
    """Return the seconds per step, from step 40 to step 60."""
    early, late = (play(cluster, strategy, n, task=Kept(dimension=FLOATS)).seconds for n in (40, 60))
    return (late - early) / 20


@pytest.mark.parametrize("strategy", [ASP(), SSP(staleness=3)], ids=str)
@pytest.mark.parametrize("distance", [0.2, 0.4])
def test_equal_workers_return_into_phase(strategy: AnyStrategy, distance: float) -> None:
    """On links that are divided evenly workers keep their distance, a part of an exchange, for ever.

    In phase the packets of a message still wait for those of others: a tenth more than links would need.
    """
    late = Slowdown(
        workers=(3,), from_s=0.0, until_s=COMPUTE_S / 2, factor=1 + distance * IN_PHASE_S / COMPUTE_S
    )
    even, queued = (cluster_of(*[COMPUTE_S] * WORLD, slow=(late,), queue_s=queue_s) for queue_s in (0.0, 0.1))
    assert pace_s(even, strategy) == pytest.approx((1 + 2 * distance) * IN_PHASE_S, rel=0.01)
    assert pace_s(queued, strategy) == pytest.approx(1.1 * IN_PHASE_S, rel=0.03)


def test_queues_change_no_training() -> None:
    """Rings and their order are the same, so the model is the same to the bit."""
    even, queued = (cluster_of(0.05, 0.07, queue_s=queue_s) for queue_s in (0.0, 0.1))
    found = [play(cluster, BSP(), 6) for cluster in (even, queued)]
    assert found[0].seconds == pytest.approx(found[1].seconds, rel=1e-9)
    assert [each.value for each in found[0].history] == [each.value for each in found[1].history]
