"""The fluid network against closed forms, to the event, and against its promises on random clusters."""

import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.worlds.virtual.cluster import Cluster, ServerMachines, Site, load_cluster
from offbeat.worlds.virtual.flow import Transfer
from offbeat.worlds.virtual.network import Network
from tests.support.networks import MB, arrivals, close, network_of, workers

pytestmark = pytest.mark.virtual

Exchange = Callable[[Network, Sequence[int], range], Transfer]


# --- operations alone


@pytest.mark.parametrize("n", [2, 3, 4, 16, 1000])
def test_a_ring_of_equal_workers(n: int) -> None:
    network = network_of(workers(n, latency_s=0.001), operation_s=0.01)
    ring = network.ring_all_reduce(40 * MB, range(n))
    expected = 2 * (n - 1) / n * 40 / 100 + 2 * (n - 1) * 0.001 + 0.01
    assert ring.alone_s == close(expected)
    assert arrivals(network, (0.0, ring)) == {ring: close(expected)}


def test_an_all_reduce_takes_its_least_however_small_it_is() -> None:
    free, network = (network_of(workers(4), least_reduce_s=least_s) for least_s in (0.0, 0.3))
    for nbytes in (64, 1000, 10 * MB):  # the last one takes 0.15 s by itself
        small = network.all_reduce(nbytes, range(4))
        assert small.alone_s == close(0.3)
        assert small.sent.tolist() == free.all_reduce(nbytes, range(4)).sent.tolist()
    large, control = network.all_reduce(40 * MB, range(4)), network.all_reduce(8, range(4))
    assert large.alone_s == close(0.6) and control.alone_s < 1e-6
    assert network.all_reduce(1000, range(1)).alone_s == 0, "one worker has nobody to wait for"


def test_an_all_reduce_of_a_few_numbers_has_a_least_of_its_own() -> None:
    network = network_of(workers(4), least_control_s=0.1, least_reduce_s=0.3)
    assert [network.all_reduce(nbytes, range(4)).alone_s for nbytes in (4, 63, 64)] == close([0.1, 0.1, 0.3])
    assert network.all_reduce(4, range(1)).alone_s == 0


@pytest.mark.parametrize("operation", [Network.all_gather, Network.reduce_scatter])
def test_an_exchange_of_slices_takes_its_least_however_small_it_is(operation: Exchange) -> None:
    free, network = (network_of(workers(4), least_exchange_s=least_s) for least_s in (0.0, 0.3))
    for nbytes in (16, 1000, 5 * MB):  # the last one takes 0.15 s by itself
        small = operation(network, [nbytes] * 4, range(4))
        assert small.alone_s == close(0.3)
        assert small.sent.tolist() == operation(free, [nbytes] * 4, range(4)).sent.tolist()
    large, control = (operation(network, [nbytes] * 4, range(4)) for nbytes in (20 * MB, 1))
    assert large.alone_s == close(0.6) and control.alone_s < 1e-6
    assert network.all_reduce(1000, range(4)).alone_s < 0.1, "an all-reduce has a least time of its own"


def test_one_slow_nic_bounds_the_ring() -> None:
    network = network_of(workers(3), workers(1, mbytes_per_s=10))
    ring = network.ring_all_reduce(40 * MB, range(4))
    assert arrivals(network, (0.0, ring))[ring] == close(1.5 * 40 / 10)
    without = network.ring_all_reduce(40 * MB, range(3))
    assert without.alone_s == close(4 / 3 * 0.4)


def test_latency_goes_round_the_ring_and_counts_the_slowest_way() -> None:
    network = network_of(workers(3, latency_s=0.001), workers(1, latency_s=0.1))
    # two of four edges touch the far worker; the two hops that a share need not make are near ones
    assert network.ring_all_reduce(0, range(4)).alone_s == close(4 * 0.1 + 2 * 0.001)


@pytest.mark.parametrize("n", [2, 3, 5, 8, 1000])
def test_a_tree_of_equal_workers(n: int) -> None:
    network = network_of(workers(n, latency_s=0.001), operation_s=0.01)
    rounds = math.ceil(math.log2(n))
    tree = network.tree_all_reduce(4 * MB, range(n))
    assert arrivals(network, (0.0, tree))[tree] == close(rounds * 0.04 + 2 * rounds * 0.001 + 0.01)
    assert network.broadcast(4 * MB, range(n), 1).alone_s == close(rounds * 0.04 + rounds * 0.001 + 0.01)


@pytest.mark.parametrize("n", [2, 3, 4, 16, 1000])
@pytest.mark.parametrize("operation", [Network.all_gather, Network.reduce_scatter])
def test_slices_of_equal_workers_take_as_many_rounds_as_a_tree_has_levels(
    operation: Exchange, n: int
) -> None:
    for collectives, rounds in (("ring", n - 1), ("tree", math.ceil(math.log2(n)))):
        network = network_of(workers(n, latency_s=0.001), operation_s=0.01, collectives=collectives)
        exchange = operation(network, [MB] * n, range(n))
        expected = rounds * 0.001 + (n - 1) * 1 / 100 + 0.01
        assert exchange.alone_s == close(expected)
        assert arrivals(network, (0.0, exchange)) == {exchange: close(expected)}
        assert exchange.sent.tolist() == [(n - 1) * MB] * n
        assert network.all_to_all([MB] * n, range(n)).alone_s == close((n - 1) * (0.001 + 1 / 100) + 0.01)


@pytest.mark.parametrize("operation", [Network.all_gather, Network.reduce_scatter])
def test_the_best_way_of_slices_is_the_faster_one(operation: Exchange) -> None:
    """Four workers, the last of which is alone at a site with an uplink of 10 MB/s, slices of 1 MB.

    Its uplink carries three slices each way: one by one, or by doubling first one, and then two at once.
    """
    sites = (Site(name="a"), Site(name="b", up_bits_per_s=8e7, down_bits_per_s=8e7))
    groups = workers(3, latency_s=0.1, site="a"), workers(1, latency_s=0.1, site="b")
    seconds = {}
    for collectives in ("ring", "tree", "best"):
        network = network_of(*groups, sites=sites, collectives=collectives)
        seconds[collectives] = operation(network, [MB] * 4, range(4)).alone_s
    assert seconds == close({"ring": 3 * 0.1 + 0.3, "tree": 2 * 0.1 + 0.3, "best": 2 * 0.1 + 0.3})


def test_two_doublings_on_one_uplink_share_it() -> None:
    """Of each pair one is at either site, whose uplinks of 10 MB/s carry a slice of 1 MB each way."""
    sites = tuple(Site(name=name, up_bits_per_s=8e7, down_bits_per_s=8e7) for name in "ab")
    network = network_of(workers(2, site="a"), workers(2, site="b"), sites=sites, collectives="tree")
    one, other = (network.all_gather([MB] * 2, pair) for pair in ((0, 2), (1, 3)))
    assert arrivals(network, (0.0, one), (0.0, other)) == close({one: 0.2, other: 0.2})


def test_messages_of_all_nodes_are_remembered() -> None:
    """Workers come in turn, so a cache with room for fewer would never have what is asked for."""
    network = network_of(workers(10_000), server=ServerMachines(up_bits_per_s=8e8, down_bits_per_s=8e8))
    for _ in range(2):
        for worker in range(10_000):
            for nbytes in (0, 400):
                network.messages(((worker, network.server()),), (nbytes,))
                network.messages(((network.server(), worker),), (nbytes,))
    assert network._messages.cache_info().hits == 40_000


def test_a_tree_waits_for_its_slowest_member_in_every_round() -> None:
    network = network_of(workers(3, latency_s=0.001), workers(1, latency_s=0.1))
    assert network.tree_all_reduce(0, range(4)).alone_s == close(4 * 0.1)


def test_small_packets_take_the_tree_and_large_ones_the_ring() -> None:
    network = network_of(workers(16, latency_s=0.001), backend="nccl")
    # 4 copies and 8 hops against 2·15/16 copies and 30 hops
    crossover = (30 - 8) * 0.001 / (4 - 30 / 16) * 100 * MB
    for share, chosen in ((0.0, "tree"), (0.99, "tree"), (1.01, "ring")):
        nbytes = int(share * crossover)
        picked = network.all_reduce(nbytes, range(16))
        expected = getattr(network, f"{chosen}_all_reduce")(nbytes, range(16))
        assert picked.route is expected.route
        assert picked.sent.tolist() == expected.sent.tolist()
    tie = network_of(workers(16), collectives="best").all_reduce(0, range(16))
    assert tie.route.alone_bytes_per_s == 100 * MB, "a tie: the ring"


def test_an_all_reduce_goes_the_way_of_its_backend_unless_the_cluster_says_another() -> None:
    """Of no bytes, between 4 workers 1 s apart: 6 hops around a ring, 4 up and down a tree."""
    for ways, hops in (
        ({}, 6),
        ({"backend": "gloo"}, 6),
        ({"backend": "nccl"}, 4),
        ({"backend": "nccl", "collectives": "ring"}, 6),
        ({"collectives": "tree"}, 4),
        ({"collectives": "best"}, 4),
    ):
        assert network_of(workers(4, latency_s=1.0), **ways).all_reduce(0, range(4)).alone_s == close(hops)
    large = network_of(workers(4), collectives="tree").all_reduce(40 * MB, range(4))
    assert large.alone_s == close(2 * 0.4), "two copies at the root, though a ring carries one and a half"


def test_over_the_internet_a_ring_of_gloo_goes_round_the_regions_twice() -> None:
    """12 edges within regions and 3 between them, twice, less the two neighbouring ones that are nearest."""
    network = Network(load_cluster("wan"))
    near_s, far_s, operation_s = 0.0001, 0.05, 0.0002
    expected = 2 * (15 * near_s + 3 * far_s) - 2 * near_s + operation_s
    assert network.all_reduce(0, range(15)).alone_s == close(expected)


def test_two_racks_at_a_quarter_of_the_rate() -> None:
    """Each uplink carries 2(N−1)/N of the bytes once, at a quarter of a NIC's rate; a tree's edge is crossed
    up and down, which "best" takes for better."""
    racks = tuple(Site(name=n, up_bits_per_s=2e8, down_bits_per_s=2e8) for n in "ab")
    groups = [workers(4, site=name) for name in "ab"]
    ring = network_of(*groups, sites=racks).all_reduce(40 * MB, range(8))
    assert ring.alone_s == close(2 * 7 / 8 * 40 / 25)
    best = network_of(*groups, sites=racks, collectives="best").all_reduce(40 * MB, range(8))
    assert best.alone_s <= ring.alone_s


def test_nothing_travels_in_a_world_of_one() -> None:
    network = network_of(workers(1, latency_s=0.1), operation_s=0.1)
    exchanges = [network.reduce_scatter([40 * MB], [0]), network.all_gather([40 * MB], [0])]
    trees = [network.tree_all_reduce(40 * MB, [0]), network.broadcast(40 * MB, [0], 0)]
    for transfer in (network.all_reduce(40 * MB, [0]), *exchanges, *trees, network.send(0, 0, 40 * MB)):
        assert arrivals(network, (3.0, transfer)) == {transfer: 3.0}
        assert transfer.sent.sum() == 0


def test_a_message_takes_the_narrower_nic_and_the_longer_latency() -> None:
    network = network_of(
        workers(1, latency_s=0.1), workers(1, mbytes_per_s=10, latency_s=0.2), operation_s=0.5
    )
    for source, target in ((0, 1), (1, 0)):
        assert network.send(source, target, 40 * MB).alone_s == close(4 + 0.2 + 0.5)


def test_servers_have_nics_of_their_own() -> None:
    server = ServerMachines(up_bits_per_s=8e8, down_bits_per_s=8e7, latency_s=0.0, count=2)
    network = Network(Cluster(workers=(workers(4),), server=server))
    assert network.send(0, network.server(1), 10 * MB).alone_s == close(1.0)
    assert network.send(network.server(1), 0, 10 * MB).alone_s == close(0.1)
    assert network.send(network.server(0), network.server(1), 10 * MB).alone_s == close(1.0)
    assert Network(Cluster(workers=(workers(4),)), servers=3).server(2) == 6
    with pytest.raises(IndexError):
        network.server(2)


# --- sites


def regions(uplink_mbytes_per_s: float = 10) -> Network:
    bits = uplink_mbytes_per_s * 8e6
    names = ("a", "b", "c")
    sites = tuple(Site(name=n, up_bits_per_s=bits, down_bits_per_s=bits, latency_s=0.05) for n in names)
    return network_of(*(workers(2, latency_s=0.001, site=name) for name in names), sites=sites)


def test_a_ring_over_sites_leaves_each_site_once() -> None:
    network = regions()
    # whatever order the ranks are named in
    ring = network.ring_all_reduce(6 * MB, [0, 2, 4, 1, 3, 5])
    assert [rank // 2 for rank in ring.senders.tolist()] == [0, 0, 1, 1, 2, 2]
    # twice 3 near and 3 far edges, but for two neighbouring ones
    assert ring.alone_s == close(10 / 6 * 0.6 + 10 * 0.001 + 5 * 0.05)
    assert network.ring_all_reduce(6 * MB, [0, 1]).alone_s == close(0.06 + 2 * 0.001), (
        "within a site: no uplink"
    )
    assert ring.route.links.size == 12 + 6


def test_a_ring_of_gloo_follows_the_ranks_and_leaves_a_site_as_often_as_they_do() -> None:
    """Ranks a b a b: four crossings, two of each uplink. NCCL's ring would cross each once."""
    sites = tuple(Site(name=n, up_bits_per_s=8e7, down_bits_per_s=8e7, latency_s=1.0) for n in "ab")
    groups = [workers(1, site=name) for name in "abab"]
    by_rank = network_of(*groups, sites=sites).ring_all_reduce(40 * MB, range(4))
    assert by_rank.senders.tolist() == [0, 1, 2, 3]
    assert by_rank.alone_s == close(2 * 1.5 * 40 / 10 + 6 * 1.0)
    by_site = network_of(*groups, sites=sites, backend="nccl").ring_all_reduce(40 * MB, range(4))
    assert by_site.senders.tolist() == [0, 2, 1, 3]
    assert by_site.alone_s == close(1.5 * 40 / 10 + 3 * 1.0)
    assert by_rank.sent.tolist() == by_site.sent.tolist() == [60 * MB] * 4


def test_messages_share_the_uplink_of_their_site() -> None:
    network = regions()
    first, second = network.send(0, 2, 10 * MB), network.send(1, 4, 10 * MB)
    inside = network.send(0, 1, 10 * MB)
    arrived = arrivals(network, (0.0, first), (0.0, second), (0.0, inside))
    assert arrived[first] == arrived[second] == close(2.0 + 0.051)
    # the uplink leaves the NIC 95 MB/s
    assert arrived[inside] == close(10 / 95 + 0.001)


def test_trees_over_sites_pay_uplinks_by_the_edges_that_cross() -> None:
    network = regions()
    # in site order 0…5, parents 0 0 2 0 4: the edges 2→0 and 4→0 cross
    tree = network.tree_all_reduce(6 * MB, range(6))
    assert tree.alone_s == close(2 * 0.6 + 2 * (3 * 0.001 + 0.05))
    down = network.broadcast(6 * MB, range(6), root=3)
    assert down.senders.tolist()[:2] == [3, 2]
    assert down.alone_s == close(2 * 0.6 + 3 * 0.001 + 0.05)


def test_a_tree_crosses_sites_both_ways() -> None:
    sites = (Site(name="a"), Site(name="b", up_bits_per_s=8e7))
    network = network_of(workers(1, site="a"), workers(1, site="b"), sites=sites)
    assert network.tree_all_reduce(10 * MB, [0, 1]).alone_s == close(1.0), "up through the narrow uplink of b"
    assert network.broadcast(10 * MB, [0, 1], 0).alone_s == close(0.1), "down past it"


def test_a_site_without_limits_costs_latency_only() -> None:
    sites = (Site(name="a", latency_s=0.5),)
    network = network_of(workers(1, site="a"), workers(1), sites=sites)
    assert network.send(0, 1, 10 * MB).alone_s == close(0.1 + 0.5)
    assert network.tree_all_reduce(10 * MB, [0, 1]).alone_s == close(0.1 + 1.0)


# --- sharing


def test_time_does_not_go_back_and_nodes_must_exist() -> None:
    network = network_of(workers(2))
    network.advance(1.0)
    with pytest.raises(ValueError, match="time cannot go"):
        network.start(0.5, network.send(0, 1, 1))
    for bad in ([0, 0], [0, 3], [-1, 0], []):
        with pytest.raises(ValueError, match="different nodes out of 0 to 2"):
            network.all_reduce(1, bad)
    with pytest.raises(ValueError, match="root 2"):
        network.broadcast(1, [0, 1], 2)
    with pytest.raises(ValueError, match="bytes"):
        network.send(0, 1, -1)


# --- the ledger's bytes


@given(st.integers(1, 40), st.integers(0, 10_000))
def test_bytes_are_whole_and_their_sum_is_exact(n: int, nbytes: int) -> None:
    network = network_of(workers(40))
    ranks = list(range(n))
    ring, tree = network.ring_all_reduce(nbytes, ranks), network.tree_all_reduce(nbytes, ranks)
    broadcast = network.broadcast(nbytes, ranks, n - 1)
    assert int(ring.sent.sum()) == int(tree.sent.sum()) == 2 * (n - 1) * nbytes
    assert int(broadcast.sent.sum()) == (n - 1) * nbytes
    assert abs(ring.sent - 2 * (n - 1) * nbytes / n).max() <= 2
    for transfer in (ring, tree, broadcast):
        assert sorted(transfer.senders.tolist()) == ranks


def test_bytes_by_hand() -> None:
    network = network_of(workers(4))
    # shares of 3 3 2 2: node i keeps back share i+1 on the first way round, i+2 on the second
    assert network.ring_all_reduce(10, range(4)).sent.tolist() == [15, 16, 15, 14]
    # parents 0 0 2: the root has two children, node 2 one
    assert network.tree_all_reduce(10, range(4)).sent.tolist() == [20, 10, 20, 10]
    assert network.broadcast(10, range(4), 0).sent.tolist() == [20, 0, 10, 0]
    send = network.send(3, 1, 10)
    assert (send.senders.tolist(), send.sent.tolist()) == ([3], [10])
