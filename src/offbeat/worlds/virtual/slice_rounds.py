"""Rounds in which slices travel among N nodes: what they put on links, and the latency of all of them.

    pairwise    N−1 rounds: in round d to the node d after, each its own slice, as gloo's exchanges do
    doubling    ⌈log2 N⌉ rounds: in round d = 1, 2, 4, … node i sends its first slices to node i−d, and so has
                twice as many (Bruck et al., 1997), as MPI does with any number of nodes

Both put all slices but its own into each node's NIC. A reduce-scatter is an all-gather backwards: each node
sends what it would get, and halves what it holds in every round of the doubling. An all-to-all has no such
way: in ⌈log2 N⌉ rounds each node would send N/2 slices in each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from offbeat.worlds.virtual.flow import Floats, Ints

HopSeconds = Callable[[Ints, Ints], Floats]
"""A function of sources and targets that returns the latency from each source to its target."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Loads:
    """Bytes on the links of nodes, in order, and on those of sites."""

    sent: Ints
    received: Ints
    leaving: Ints  # by site
    entering: Ints

    def backwards(self) -> Loads:
        """Return the loads of the same rounds in the other direction, as of a reduce-scatter."""
        return Loads(sent=self.received, received=self.sent, leaving=self.entering, entering=self.leaving)

    @classmethod
    def none(cls, nodes: int, sites: int) -> Loads:
        """Return no loads, to be added to."""
        sent, received = np.zeros((2, nodes), dtype=np.int64)
        leaving, entering = np.zeros((2, sites), dtype=np.int64)
        return cls(sent=sent, received=received, leaving=leaving, entering=entering)


class SliceRounds(ABC):
    """The rounds of one way in which slices travel among nodes, in the order of ranks."""

    @abstractmethod
    def loads(self, size: Ints, site: Ints, sites: int) -> Loads:
        """Return what an all-gather puts on links, by the sizes of the nodes' slices and their sites."""

    @abstractmethod
    def latency_s(self, order: Ints, kinds: Floats, hop_s: HopSeconds) -> float:
        """Return the latency of all rounds; nodes with the same column of `kinds` have the same hops."""


class Pairwise(SliceRounds):
    """N−1 rounds, one with each other node."""

    def loads(self, size: Ints, site: Ints, sites: int) -> Loads:
        n, total = len(size), size.sum()
        members = np.bincount(site, minlength=sites)
        site_size = np.bincount(site, size, sites).astype(np.int64)
        # others' slices once per member, own slices once per node elsewhere
        return Loads(
            sent=(n - 1) * size,
            received=total - size,
            leaving=(n - members) * site_size,
            entering=members * (total - site_size),
        )

    def latency_s(self, order: Ints, kinds: Floats, hop_s: HopSeconds) -> float:
        """Return the latency of the node whose hops take longest."""
        _, first = np.unique(kinds, axis=1, return_index=True)
        hops_s = ((at, hop_s(np.full(len(order), order[at]), order)) for at in first)
        return max(float(hops.sum() - hops[at]) for at, hops in hops_s)


class Doubling(SliceRounds):
    """⌈log2 N⌉ rounds, in each of which every node has twice as many slices."""

    def loads(self, size: Ints, site: Ints, sites: int) -> Loads:
        nodes = np.arange(len(size))
        before = np.concatenate([[0], np.cumsum(np.tile(size, 2))])  # node i holds slices i, i+1, … around
        loads = Loads.none(len(size), sites)
        for distance in _distances(len(size)):
            load = before[nodes + min(distance, len(size) - distance)] - before[nodes]
            target = nodes - distance
            far = site != site[target]
            np.add.at(loads.sent, nodes, load)
            np.add.at(loads.received, target, load)
            np.add.at(loads.leaving, site[far], load[far])
            np.add.at(loads.entering, site[target[far]], load[far])
        return loads

    def latency_s(self, order: Ints, kinds: Floats, hop_s: HopSeconds) -> float:
        """Return the longest chain of hops, of which each awaits the one before; backwards it is the same."""
        done_s = np.zeros(len(order))
        for distance in _distances(len(order)):
            source = (np.arange(len(order)) + distance) % len(order)
            done_s = np.maximum(done_s, done_s[source] + hop_s(order[source], order))
        return float(done_s.max())


def _distances(n: int) -> list[int]:
    """Return how far slices travel in each round of a doubling."""
    return [1 << number for number in range((n - 1).bit_length())]


PAIRWISE, DOUBLING = Pairwise(), Doubling()
WAYS: Mapping[str, tuple[SliceRounds, ...]] = {  # by what a cluster says of collectives
    "ring": (PAIRWISE,),
    "tree": (DOUBLING,),
    "best": (PAIRWISE, DOUBLING),
}
