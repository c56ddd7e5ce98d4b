"""Network of a cluster: its links, and the bytes that each operation puts on them.

Nodes are the workers by rank, then the servers. A node has a NIC with two directions, a site an uplink with
two. The latency of a path is the longer latency of its two ends, plus, between sites, the longer of the two
sites' latencies.

Times are computed from exact fractions (a ring's NICs each carry 2(N−1)/N of the bytes). The ledger counts
whole bytes: N slices of a packet are bytes // N long, the first bytes % N of them one byte longer, and each
node is charged for the slices that it sends, so the sum over all nodes is exact.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from offbeat.core.ledger import CONTROL_BYTES
from offbeat.worlds.virtual.cluster import Cluster, ServerMachines, Site, Workers
from offbeat.worlds.virtual.flow import Bundle, Floats, FlowNetwork, Ints, Route, Transfer
from offbeat.worlds.virtual.rates import DOWN, UP, changes_of, rate_of
from offbeat.worlds.virtual.slice_rounds import PAIRWISE, WAYS, SliceRounds
from offbeat.worlds.virtual.tcp import slow_start_s

NodeSet = tuple[int, ...] | range
Paths = tuple[tuple[int, int], ...]  # nodes: from, to
_CACHED = 256  # sets of nodes whose routes are cached
_MOST_CACHED_MESSAGES = 32  # from or to the shards of a server; more are seldom the same again


@dataclass(frozen=True, eq=False, kw_only=True)
class _Ring:
    """Route of a ring all-reduce."""

    nodes: Ints  # in ring order
    twice_around: Route
    rtt_s: float = 0.0  # of the longest hop
    crossings: int = 1  # of the busiest link: an uplink, where the ring leaves a site more than once


@dataclass(frozen=True, eq=False, kw_only=True)
class _Tree:
    """Route of a broadcast or a tree all-reduce."""

    nodes: Ints
    route: Route
    busiest: float  # copies of the packet on the busiest link
    copies: Ints  # copies of the packet that each node sends

    def transfer(self, nbytes: int) -> Transfer:
        return Transfer(
            route=self.route, nbytes=self.busiest * nbytes, senders=self.nodes, sent=self.copies * nbytes
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class _Exchange:
    """Route of an exchange of slices between all nodes."""

    nodes: Ints
    route: Route
    busiest: float  # bytes on the busiest link
    sent: Ints

    def transfer(self) -> Transfer:
        return Transfer(route=self.route, nbytes=self.busiest, senders=self.nodes, sent=self.sent)


@dataclass(frozen=True, eq=False, kw_only=True)
class Messages:
    """Messages that leave together, and the latency of each, which follows its bytes."""

    bundle: Bundle
    links: list[tuple[int, ...]]  # of each
    latency_s: list[float]
    slow_start_s: list[float]  # lost where the connection has been idle
    rtt_s: list[float]
    together: bool  # all have the same latency, and none can lose time


class Network(FlowNetwork):
    """The links of a cluster; its methods build the transfers of operations, to be started on it."""

    def __init__(self, cluster: Cluster, servers: int | None = None) -> None:
        first = cluster.workers[0]
        server = cluster.server or ServerMachines(
            up_bits_per_s=rate_of(first.up_bits_per_s, 0, UP),
            down_bits_per_s=rate_of(first.down_bits_per_s, 0, DOWN),
            latency_s=first.latency_s,
            site=first.site,
        )
        self.workers, self.queue_s = cluster.size, cluster.queue_s
        self.servers = server.count if servers is None else servers
        ends: list[Workers | ServerMachines] = [*cluster.workers, server]
        counts = [*(group.count for group in cluster.workers), self.servers]
        sites = [Site(name=""), *cluster.sites]  # nodes without a site use no uplink
        names = [site.name for site in sites]
        end_of = [end for end, count in zip(ends, counts, strict=True) for _ in range(count)]
        self._nodes = len(end_of)
        self._site = np.repeat([names.index(end.site) for end in ends], counts)
        self._node_latency_s = np.repeat([end.latency_s for end in ends], counts)
        self._site_latency_s = np.array([site.latency_s for site in sites])
        self._operation_s = cluster.operation_s
        self._least_reduce_s = cluster.least_reduce_s
        self._least_exchange_s = cluster.least_exchange_s
        self._least_control_s = cluster.least_control_s
        self._slow_start, self._all_reduces_by = cluster.slow_start, cluster.all_reduces_by
        self._in_rank_order = cluster.backend == "gloo"  # NCCL's rings keep the nodes of a site together
        bits_per_s = [
            np.array([rate_of(end.up_bits_per_s, node, UP) for node, end in enumerate(end_of)]),
            np.array([rate_of(end.down_bits_per_s, node, DOWN) for node, end in enumerate(end_of)]),
            np.array([site.up_bits_per_s for site in sites]),
            np.array([site.down_bits_per_s for site in sites]),
        ]
        self._bits_per_byte = 8 * (1 + cluster.headers)
        super().__init__(np.concatenate(bits_per_s) / self._bits_per_byte)
        self._first_link = np.cumsum([0, *map(len, bits_per_s[:-1])])
        # where rates change: the time, the links and their bits per second from then on
        self.rate_changes: list[tuple[float, Ints, float]] = []
        self._find_changes(ends, counts, self._first_link[:2])
        self._find_changes(sites, [1] * len(sites), self._first_link[2:])
        self._ring = lru_cache(_CACHED)(self._find_ring)
        self._tree = lru_cache(_CACHED)(self._find_tree)
        self._exchange = lru_cache(_CACHED)(self._find_exchange)
        self._rounds_s = lru_cache(_CACHED)(self._find_rounds_s)
        # paths from and to each node, and its messages: in turn, so too small a cache would have none of them
        self._path = lru_cache(max(_CACHED * 256, 4 * self._nodes))(self._find_path)
        self._messages = lru_cache(max(_CACHED * 64, 8 * self._nodes))(self._find_messages)

    def server(self, index: int = 0) -> int:
        """Return the node of a server, for `send`."""
        return self.workers + range(self.servers)[index]

    def change_rate(self, now_s: float, links: Ints, bits_per_s: float) -> None:
        """Change the rate of links from now on, also for the transfers that are on them."""
        self.set_rate(now_s, links, bits_per_s / self._bits_per_byte)
        for cached in (self._ring, self._tree, self._exchange, self._path, self._messages):
            cached.cache_clear()  # routes know how fast they are alone

    def _find_changes(
        self, ends: Sequence[Workers | ServerMachines | Site], counts: Sequence[int], first: Ints
    ) -> None:
        begin = 0
        for end, count in zip(ends, counts, strict=True):
            nodes = np.arange(begin, begin + count)
            begin += count
            for link, rate in zip(first, (end.up_bits_per_s, end.down_bits_per_s), strict=True):
                self.rate_changes += [(at_s, link + nodes, bits) for at_s, bits in changes_of(rate)]

    # --- operations

    def all_reduce(self, nbytes: int, nodes: Iterable[int]) -> Transfer:
        """Build an all-reduce as the cluster says: by ring, by tree, or by what is faster on idle links."""
        nodes, ways = _as_set(nodes), []
        if self._all_reduces_by != "tree":
            ways.append(self.ring_all_reduce(nbytes, nodes))
        if self._all_reduces_by != "ring":
            ways.append(self.tree_all_reduce(nbytes, nodes))
        transfer = min(ways, key=lambda transfer: transfer.alone_s)  # on a tie, by ring
        return _at_least(transfer, self._least_reduce_s if nbytes >= CONTROL_BYTES else self._least_control_s)

    def ring_all_reduce(self, nbytes: int, nodes: Iterable[int]) -> Transfer:
        """Build an all-reduce twice around a ring: every NIC carries 2(N−1)/N of the bytes, each way."""
        ring = self._ring(_as_set(nodes))
        sizes = _slice_sizes(nbytes, len(ring.nodes))
        # node i sends all slices but i+1 while they are summed, then owns i+1 and sends all but i+2
        sent = 2 * nbytes - np.roll(sizes, -1) - np.roll(sizes, -2)
        on_nics = 2 * (len(ring.nodes) - 1) * nbytes / len(ring.nodes)
        return Transfer(
            route=ring.twice_around,
            nbytes=ring.crossings * on_nics,
            senders=ring.nodes,
            sent=sent,
            slow_start_s=self._slow_start_s(
                on_nics, ring.twice_around.alone_bytes_per_s / ring.crossings, ring.rtt_s
            ),
            rtt_s=ring.rtt_s,
        )

    def ring_rate(self, nodes: Iterable[int]) -> float:
        """Return the bytes per second that each node sends in a ring with nothing else under way."""
        return (ring := self._ring(_as_set(nodes))).twice_around.alone_bytes_per_s / ring.crossings

    def all_to_all(self, sizes: Sequence[int], nodes: Iterable[int]) -> Transfer:
        """Build a pairwise exchange, in which every node sends slice k to node k."""
        return self._exchanged(sizes, nodes, True, (PAIRWISE,))

    def reduce_scatter(self, sizes: Sequence[int], nodes: Iterable[int]) -> Transfer:
        """Build an exchange in which every node gets its slice, reduced: an all-gather backwards."""
        return self._exchanged(sizes, nodes, True, WAYS[self._all_reduces_by])

    def all_gather(self, sizes: Sequence[int], nodes: Iterable[int]) -> Transfer:
        """Build an exchange in which every node gets the slices of all others, as the cluster says."""
        return self._exchanged(sizes, nodes, False, WAYS[self._all_reduces_by])

    def tree_all_reduce(self, nbytes: int, nodes: Iterable[int]) -> Transfer:
        """Build an all-reduce up and down a binomial tree, ⌈log2 N⌉ hops and copies at the root's NIC each.

        The broadcast down follows the reduction up piece by piece, so both directions of a NIC are busy.
        """
        return self._tree(_as_set(nodes), None).transfer(_checked(nbytes))

    def broadcast(self, nbytes: int, nodes: Iterable[int], root: int) -> Transfer:
        """Build a broadcast down a binomial tree: ⌈log2 N⌉ hops, and as many copies leave the root's NIC."""
        return self._tree(_as_set(nodes), root).transfer(_checked(nbytes))

    def send(self, source: int, target: int, nbytes: int) -> Transfer:
        """Build a message from one node to another; a message to the sender takes no time."""
        if source == target:
            return Transfer(route=self.route({}), nbytes=0.0)
        return Transfer(
            route=self._path(source, target),
            nbytes=float(nbytes),
            senders=_vector(source),
            sent=_vector(_checked(nbytes)),
        )

    def messages(self, paths: Paths, sizes: tuple[int, ...]) -> "Messages":
        """Build messages from node to other node that leave together, as `send` does, latencies apart.

        So the next message of a connection can leave as soon as the bytes of an earlier one have left.
        """
        find = self._messages if len(paths) <= _MOST_CACHED_MESSAGES else self._find_messages
        return find(paths, sizes)

    # --- internals

    def _exchanged(
        self, sizes: Sequence[int], nodes: Iterable[int], scatters: bool, ways: tuple[SliceRounds, ...]
    ) -> Transfer:
        nodes, sizes = _as_set(nodes), tuple(sizes)
        transfers = [self._exchange(nodes, sizes, scatters, way).transfer() for way in ways]
        transfer = min(transfers, key=lambda transfer: transfer.alone_s)  # on a tie, pairwise
        return _at_least(transfer, self._least_exchange_s) if sum(sizes) >= CONTROL_BYTES else transfer

    def _slow_start_s(self, nbytes: float, bytes_per_s: float, rtt_s: float) -> float:
        return slow_start_s(nbytes, bytes_per_s, rtt_s) if self._slow_start else 0.0

    def _find_messages(self, paths: Paths, sizes: tuple[int, ...]) -> "Messages":
        routes = [self._path(*path) for path in paths]
        rtts = [2 * (route.latency_s - self._operation_s) for route in routes]
        latency_s = [route.latency_s for route in routes]
        slow_start_s = [
            self._slow_start_s(nbytes, route.alone_bytes_per_s, rtt_s)
            for nbytes, route, rtt_s in zip(sizes, routes, rtts, strict=True)
        ]
        return Messages(
            bundle=Bundle.of(routes, sizes),
            links=[tuple(route.links.tolist()) for route in routes],
            latency_s=latency_s,
            slow_start_s=slow_start_s,
            rtt_s=rtts,
            together=len(set(latency_s)) == 1 and not any(slow_start_s),
        )

    def _hop_s(self, sources: Ints, targets: Ints) -> Floats:
        near: Floats = np.maximum(self._node_latency_s[sources], self._node_latency_s[targets])
        return near + self._far_s(sources, targets)

    def _far_s(self, sources: Ints, targets: Ints) -> Floats:
        here, there = self._site[sources], self._site[targets]
        far = np.maximum(self._site_latency_s[here], self._site_latency_s[there])
        return np.where(here != there, far, 0.0)

    def _check_nodes(self, nodes: Ints) -> None:
        if (
            not len(nodes)
            or nodes.min() < 0
            or nodes.max() >= self._nodes
            or len(np.unique(nodes)) < len(nodes)
        ):
            raise ValueError(f"expected different nodes out of 0 to {self._nodes - 1}, not {nodes}")

    def _find_path(self, source: int, target: int) -> Route:
        if source == target or not 0 <= min(source, target) <= max(source, target) < self._nodes:
            self._check_nodes(np.array([source, target]))
        here, there = int(self._site[source]), int(self._site[target])
        up, down, site_up, site_down = self._first_link
        links = [up + source, down + target]
        hop_s = max(self._node_latency_s[source], self._node_latency_s[target])
        if here != there:
            links += [site_up + here, site_down + there]
            hop_s += max(self._site_latency_s[here], self._site_latency_s[there])
        return self.route(dict.fromkeys(links, 1.0), float(hop_s) + self._operation_s)

    def _find_ring(self, nodes: NodeSet) -> _Ring:
        order = np.array(nodes, dtype=np.int64)
        self._check_nodes(order)
        if len(order) == 1:
            return _Ring(nodes=order, twice_around=self.route({}))
        by_site = np.argsort(self._site[order], kind="stable")
        order = np.sort(order) if self._in_rank_order else order[by_site]
        after = np.roll(order, -1)
        here, there = self._site[order], self._site[after]
        up, down, site_up, site_down = self._first_link
        nics = [up + order, down + order]
        crossed = np.concatenate([*nics, site_up + here[here != there], site_down + there[here != there]])
        links, times = np.unique(crossed, return_counts=True)
        # 2(N−1) hops in a row, from where they take longest: twice all edges but two
        hops = self._hop_s(order, after)
        twice_s = float(2 * hops.sum() - (hops + np.roll(hops, -1)).min()) + self._operation_s
        route = self.route_of(links, times.astype(np.float64), twice_s)
        rtt_s = 2 * float(hops.max())
        return _Ring(nodes=order, twice_around=route, rtt_s=rtt_s, crossings=int(times.max()))

    def _find_exchange(
        self, nodes: NodeSet, sizes: tuple[int, ...], scatters: bool, way: SliceRounds
    ) -> _Exchange:
        order = np.array(nodes, dtype=np.int64)
        latency_s = self._rounds_s(nodes, way)
        size = np.array([_checked(nbytes) for nbytes in sizes], dtype=np.int64)
        if len(size) != len(order):
            raise ValueError(f"{len(size)} slices for {len(order)} nodes")
        sites = np.arange(len(self._site_latency_s))
        loads = way.loads(size, self._site[order], len(sites))
        loads = loads.backwards() if scatters else loads
        up, down, site_up, site_down = self._first_link
        links = np.concatenate([up + order, site_up + sites, down + order, site_down + sites])
        demand = np.concatenate([loads.sent, loads.leaving, loads.received, loads.entering]) * 1.0
        route = self.route_of(links, demand, latency_s)
        return _Exchange(nodes=order, route=route, busiest=float(demand.max()), sent=loads.sent)

    def _find_rounds_s(self, nodes: NodeSet, way: SliceRounds) -> float:
        order = np.array(nodes, dtype=np.int64)
        self._check_nodes(order)
        kinds = np.stack([self._node_latency_s[order], self._site[order]])  # of one kind: the same hops
        hops_s = way.latency_s(order, kinds, self._hop_s)
        return hops_s + self._operation_s * (len(order) > 1)

    def _find_tree(self, nodes: NodeSet, root: int | None) -> _Tree:
        """Return the tree of a broadcast from `root`, or of an all-reduce, whose root does not matter."""
        order = np.array(nodes, dtype=np.int64)
        self._check_nodes(order)
        if root is not None and root not in nodes:
            raise ValueError(f"the root {root} is not among the nodes")
        # by sites, the root's first, so that subtrees stay together and few edges leave a site
        start = order[0] if root is None else root
        site = self._site[order]
        order = order[np.lexsort((order != start, site, site != self._site[start]))]
        n = len(order)
        parent = np.arange(n) & (np.arange(n) - 1)  # the root is its own parent
        copies = np.bincount(parent[1:], minlength=n)
        received = np.minimum(np.arange(n), 1)
        here, there = self._site[order[parent]], self._site[order]
        sites = np.arange(len(self._site_latency_s))
        leaving = np.bincount(here[here != there], minlength=len(sites))
        entering = np.bincount(there[here != there], minlength=len(sites))
        if root is None:  # the reduction up uses every edge of the broadcast, backwards
            copies = received = copies + received
            leaving = entering = leaving + entering
        up, down, site_up, site_down = self._first_link
        links = np.concatenate([up + order, down + order, site_up + sites, site_down + sites])
        demand = np.concatenate([copies, received, leaving, entering]).astype(np.float64)
        latency_s = (2 if root is None else 1) * self._depth_s(order, parent) + self._operation_s * (n > 1)
        route = self.route_of(links, demand, latency_s)
        return _Tree(nodes=order, route=route, busiest=float(demand.max()), copies=copies)

    def _depth_s(self, order: Ints, parent: Ints) -> float:
        """Return the latency from root to leaves: rounds at the slowest NIC, plus the longest site path."""
        rounds = (len(order) - 1).bit_length()
        far_s = self._far_s(order, order[parent])
        path_s = np.zeros(len(order))
        at = np.arange(len(order))
        for _ in range(rounds):
            path_s += far_s[at]
            at = parent[at]
        return rounds * float(self._node_latency_s[order].max()) + float(path_s.max())


def _as_set(nodes: Iterable[int]) -> NodeSet:
    return nodes if isinstance(nodes, tuple | range) else tuple(nodes)


def _at_least(transfer: Transfer, least_s: float) -> Transfer:
    """Return a transfer that takes at least so many seconds, unless nobody takes part but one."""
    longer_s = least_s - transfer.alone_s
    if longer_s <= 0 or len(transfer.senders) < 2:
        return transfer
    route = replace(transfer.route, latency_s=transfer.route.latency_s + longer_s)
    return replace(transfer, route=route)


@lru_cache(1 << 16)
def _vector(number: int) -> Ints:
    """Return one number as an array that nobody changes: messages of one size share theirs."""
    vector = np.array([number])
    vector.setflags(write=False)
    return vector


def _checked(nbytes: int) -> int:
    if nbytes < 0:
        raise ValueError(f"expected a number of bytes, 0 or more, not {nbytes}")
    return nbytes


def _slice_sizes(nbytes: int, n: int) -> Ints:
    """Return the lengths of n slices of a packet."""
    whole, longer = divmod(_checked(nbytes), n)
    return whole + (np.arange(n) < longer).astype(np.int64)
