"""Ways of slices against a run of their rounds, slice by slice, and against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.worlds.virtual.slice_rounds import DOUBLING, PAIRWISE, WAYS, Loads

pytestmark = pytest.mark.virtual
SITES = 3


def played(sizes: list[int], site: list[int]) -> tuple[list[list[int]], Loads]:
    """Let every node double what it holds, round after round; return what each holds, and the loads."""
    n = len(sizes)
    held = [[node] for node in range(n)]
    loads = Loads.none(n, SITES)
    distance = 1
    while distance < n:
        before = [list(slices) for slices in held]
        for source in range(n):
            target = (source - distance) % n
            sent = [one for one in before[source] if one not in before[target]]
            held[target] += sent
            nbytes = sum(sizes[one] for one in sent)
            loads.sent[source] += nbytes
            loads.received[target] += nbytes
            if site[source] != site[target]:
                loads.leaving[site[source]] += nbytes
                loads.entering[site[target]] += nbytes
        distance *= 2
    return held, loads


def plain(loads: Loads) -> list[list[int]]:
    return [each.tolist() for each in (loads.sent, loads.received, loads.leaving, loads.entering)]


nodes = st.lists(st.tuples(st.integers(0, 50), st.integers(0, SITES - 1)), min_size=1, max_size=20)


@given(nodes)
def test_doubling_puts_on_links_what_its_rounds_do(described: list[tuple[int, int]]) -> None:
    sizes, site = map(list, zip(*described, strict=True))
    held, loads = played(sizes, site)
    assert all(sorted(slices) == list(range(len(sizes))) for slices in held), "each has all, each once"
    assert plain(DOUBLING.loads(np.array(sizes), np.array(site), SITES)) == plain(loads)


@given(nodes)
def test_both_ways_bring_every_node_all_slices_but_its_own(described: list[tuple[int, int]]) -> None:
    sizes, site = (np.array(each) for each in zip(*described, strict=True))
    for way in (PAIRWISE, DOUBLING):
        loads = way.loads(sizes, site, SITES)
        assert loads.received.tolist() == (sizes.sum() - sizes).tolist()
        assert loads.sent.sum() == (len(sizes) - 1) * sizes.sum()
        assert loads.leaving.sum() == loads.entering.sum()
        assert plain(loads.backwards().backwards()) == plain(loads)
        assert loads.backwards().sent.tolist() == loads.received.tolist()


@pytest.mark.parametrize("n", [1, 2, 3, 8, 9, 1000])
def test_latencies_of_equal_nodes(n: int) -> None:
    def hop_s(sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
        return np.full(len(sources), 0.5)

    order, kinds = np.arange(n), np.zeros((2, n))
    assert PAIRWISE.latency_s(order, kinds, hop_s) == (n - 1) * 0.5
    assert DOUBLING.latency_s(order, kinds, hop_s) == (math.ceil(math.log2(n)) if n > 1 else 0) * 0.5


def test_a_chain_of_doublings_waits_for_the_late() -> None:
    """Only what node 3 sends takes a second: to node 2, from which node 0 hears of it, and then to node 1."""

    def hop_s(sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
        return np.where(sources == 3, 1.0, 0.25)

    # round 1: node 2 is done at 1, the others at 0.25; round 2: node 0 from 2 at 1.25, node 1 from 3 at 1.25
    assert DOUBLING.latency_s(np.arange(4), np.zeros((2, 4)), hop_s) == 1.25
    assert PAIRWISE.latency_s(np.arange(4), np.arange(4)[None], hop_s) == 3.0


def test_a_cluster_that_says_ring_has_pairwise_exchanges() -> None:
    assert WAYS == {"ring": (PAIRWISE,), "tree": (DOUBLING,), "best": (PAIRWISE, DOUBLING)}
