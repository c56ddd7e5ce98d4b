"""Flows that share links: closed forms to the event, and fairness on random networks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.worlds.virtual.cluster import Site
from offbeat.worlds.virtual.flow import FlowNetwork, Landing, Transfer
from offbeat.worlds.virtual.network import Network, Paths
from tests.support.networks import MB, arrivals, close, network_of, workers

pytestmark = pytest.mark.virtual


def test_many_to_one_server() -> None:
    network = network_of(workers(50, latency_s=0.001))
    pushes = [network.send(rank, network.server(), 2 * MB) for rank in range(50)]
    arrived = arrivals(network, *((0.0, push) for push in pushes))
    assert len(set(arrived.values())) == 1, "ties are ties"
    assert arrived[pushes[0]] == close(50 * 2 / 100 + 0.001)
    assert list(arrived) == pushes, "in order of start"


def test_two_flows_share_a_link() -> None:
    network = network_of(workers(3))
    short, long = network.send(0, 1, 10 * MB), network.send(0, 2, 30 * MB)
    assert arrivals(network, (0.0, short), (0.0, long)) == {short: close(2 * 0.1), long: close(0.1 + 0.3)}


def test_a_flow_joins_midway() -> None:
    network = network_of(workers(3))
    first, second = network.send(0, 1, 30 * MB), network.send(0, 2, 30 * MB)
    arrived = arrivals(network, (0.0, first), (0.2, second))
    # 20 MB alone, then 10 MB at half speed; then 20 MB alone
    assert arrived == {first: close(0.2 + 0.2), second: close(0.4 + 0.2)}


def test_the_background_slows_the_foreground() -> None:
    network = network_of(workers(4))
    front, back = network.ring_all_reduce(40 * MB, range(4)), network.ring_all_reduce(400 * MB, range(4))
    assert arrivals(network, (0.0, back), (1.0, front)) == {
        front: close(1.0 + 2 * 0.6),
        back: close(6.0 + 0.6),
    }


def test_who_is_held_back_elsewhere_leaves_the_rest_to_others() -> None:
    network = network_of(workers(2), workers(1, mbytes_per_s=10))
    to_slow, to_fast = network.send(0, 2, 10 * MB), network.send(0, 1, 90 * MB)
    network.start(0.0, to_slow)
    network.start(0.0, to_fast)
    assert network.speed(to_slow) == close(10 * MB)
    assert network.speed(to_fast) == close(90 * MB)
    assert network.load()[:3].tolist() == [close(100 * MB), 0, 0]
    assert arrivals(network) == {to_slow: close(1.0), to_fast: close(1.0)}


def test_the_latency_of_one_does_not_hold_links_from_another() -> None:
    network = network_of(workers(1, latency_s=10), workers(1))
    first, second = network.send(0, 1, 10 * MB), network.send(0, 1, 10 * MB)
    network.start(0.0, first)
    network.start(0.05, second)
    # both at half speed from 0.05 on: 5 MB until 0.15, then 5 MB alone
    off_the_links_s = network.next_event()
    assert off_the_links_s is not None
    assert off_the_links_s == close(0.15)
    assert network.advance(off_the_links_s) == []
    assert network.next_event() == close(0.2)
    assert arrivals(network) == {first: close(10.15), second: close(10.2)}


def test_disjoint_transfers_do_not_touch_each_other() -> None:
    network = network_of(workers(4))
    pair, other = network.send(0, 1, 10 * MB), network.send(2, 3, 10 * MB)
    assert arrivals(network, (0.0, pair), (0.03, other)) == {pair: 0.1, other: close(0.13)}


def test_symmetric_rings_end_at_the_same_instant_in_company() -> None:
    network = network_of(workers(12))
    rings = [network.ring_all_reduce(7 * MB + 1, range(first, first + 4)) for first in (0, 4, 8)]
    company = [network.send(first, first + 1, MB // 3) for first in (0, 4, 8)]
    starts = [(0.0, ring) for ring in rings] + [(0.01, message) for message in company]
    arrived = arrivals(network, *starts)
    assert len({arrived[ring] for ring in rings}) == 1
    assert len({arrived[message] for message in company}) == 1


def test_cancelling_frees_the_links() -> None:
    network = network_of(workers(3, latency_s=1.0))
    dead, alive = network.send(0, 1, 30 * MB), network.send(0, 2, 30 * MB)
    network.start(0.0, dead)
    network.start(0.0, alive)
    network.cancel(0.2, dead)  # each has sent 10 MB
    assert arrivals(network) == {alive: close(0.4 + 1.0)}
    on_its_way = network.send(0, 1, 0)
    network.start(2.0, on_its_way)
    network.cancel(2.5, on_its_way)
    assert network.next_event() is None


speeds_of_nics, latencies = st.sampled_from([1, 3, 10, 100]), st.sampled_from([0.0, 0.01])
nics = st.builds(workers, st.integers(1, 4), speeds_of_nics, latencies, st.sampled_from("ab"))
uplinks = st.sampled_from([8e6, 4e7, math.inf])
Busy = tuple[Network, list[tuple[float, Transfer]]]


@st.composite
def busy_networks(draw: st.DrawFn) -> Busy:
    sites = tuple(Site(name=name, up_bits_per_s=draw(uplinks), latency_s=0.02) for name in "ab")
    network = network_of(*draw(st.lists(nics, min_size=2, max_size=4)), sites=sites)
    starts = []
    for _ in range(draw(st.integers(1, 12))):
        nbytes = draw(st.integers(0, 20)) * MB // 2
        nodes = sorted(draw(st.sets(st.integers(0, network.workers), min_size=2, max_size=6)))
        choices = [network.all_reduce(nbytes, nodes), network.tree_all_reduce(nbytes, nodes)]
        choices += [network.broadcast(nbytes, nodes, nodes[-1]), network.send(nodes[0], nodes[1], nbytes)]
        starts.append((draw(st.sampled_from([0.0, 0.1, 0.35, 2.0])), draw(st.sampled_from(choices))))
    return network, sorted(starts, key=lambda start: start[0])


@settings(max_examples=80, deadline=None)
@given(busy_networks())
def test_links_are_shared_fairly_fully_and_never_beyond_capacity(busy: Busy) -> None:
    network, waiting = busy
    everything = [transfer for _, transfer in waiting]
    moved = dict.fromkeys(everything, 0.0)
    arrived: dict[Transfer, float] = {}
    now_s = 0.0
    while (event := network.next_event()) is not None or waiting:
        load = network.load()
        assert (load <= network.bytes_per_s * (1 + 1e-9)).all()
        full = load >= network.bytes_per_s * (1 - 1e-9)
        speeds = {transfer: network.speed(transfer) for transfer in everything}
        going = [transfer for transfer, speed in speeds.items() if speed > 0]
        for transfer in going:
            # work conserving and max-min fair: on some full link of its route, nobody is faster
            limits = set(transfer.route.links[full[transfer.route.links]].tolist())
            rivals = [[speeds[t] for t in going if link in t.route.links] for link in limits]
            assert any(speeds[transfer] >= max(them) * (1 - 1e-9) for them in rivals)
        start_s, event_s = waiting[0][0] if waiting else math.inf, math.inf if event is None else event
        then_s = min(start_s, event_s)
        assert then_s >= now_s
        for transfer in going:
            moved[transfer] += speeds[transfer] * (then_s - now_s)
        now_s = then_s
        if start_s <= event_s:
            network.start(*waiting.pop(0))
        else:
            for transfer in network.advance(now_s):
                assert isinstance(transfer, Transfer)
                assert transfer not in arrived
                arrived[transfer] = now_s
    assert arrived.keys() == set(everything), "all arrive"
    assert not network.load().any()
    for transfer in everything:
        assert moved[transfer] == pytest.approx(transfer.nbytes, rel=1e-9, abs=1e-3)


@settings(max_examples=40, deadline=None)
@given(busy_networks())
def test_runs_repeat_bit_for_bit_and_company_never_helps(busy: Busy) -> None:
    network, starts = busy
    first = arrivals(network, *starts)
    again = arrivals(FlowNetwork(network.bytes_per_s), *starts)
    assert list(again.items()) == list(first.items())
    for start_s, transfer in starts:
        assert first[transfer] >= start_s + transfer.alone_s * (1 - 1e-9)


def landings(network: Network, waiting: list[tuple[float, Paths, list[int]]]) -> list[tuple[float, int, int]]:
    """The time, the bundle and the part of each message that arrives, in order."""
    found: list[tuple[float, int, int]] = []
    todo = list(enumerate(waiting))
    while (event := network.next_event()) is not None or todo:
        start_s = todo[0][1][0] if todo else math.inf
        if event is None or start_s <= event:
            number, (_, paths, sizes) = todo.pop(0)
            bundle = network.messages(paths, tuple(sizes)).bundle

            def landed(parts: list[int], number: int = number) -> None:
                found.extend((network.now_s, number, part) for part in parts)

            network.start_all(start_s, bundle, landed)
        else:
            for landing in network.advance(event):
                assert isinstance(landing, Landing)
                landing.landed(landing.parts)
    return found


pairs = st.permutations(range(5)).map(lambda nodes: (nodes[0], nodes[1]))
bundles = st.lists(st.tuples(pairs, st.sampled_from([0, 64, MB, 5 * MB])), min_size=1, max_size=6)
bundle_starts = st.lists(st.tuples(st.sampled_from([0.0, 0.01, 0.3]), bundles), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(bundle_starts)
def test_messages_of_a_bundle_arrive_as_if_each_had_been_started_alone(
    starts: list[tuple[float, list[tuple[tuple[int, int], int]]]],
) -> None:
    """To the bit, and in the same order."""
    starts = sorted(starts, key=lambda start: start[0])
    groups = [workers(3, 10), workers(2, 3)]
    together = [(at_s, tuple(path for path, _ in all_), [n for _, n in all_]) for at_s, all_ in starts]
    alone = [(at_s, (path,), [nbytes]) for at_s, messages in starts for path, nbytes in messages]
    origin = [(number, part) for number, (_, all_) in enumerate(starts) for part in range(len(all_))]
    singly = [(at_s, *origin[number]) for at_s, number, _ in landings(network_of(*groups), alone)]
    assert landings(network_of(*groups), together) == singly


def test_a_wide_ring_beside_others_is_exact() -> None:
    network = network_of(workers(10_000))
    ring = network.ring_all_reduce(100 * MB, range(10_000))
    beside = network.send(17, 18, 10 * MB)
    arrived = arrivals(network, (0.0, ring), (0.5, beside))
    assert arrived[beside] == close(0.7)
    assert arrived[ring] == close(2 * 9999 / 10_000 + 0.1)
    assert int(ring.sent.sum()) == 2 * 9999 * 100 * MB
    assert np.unique(ring.senders).size == 10_000
