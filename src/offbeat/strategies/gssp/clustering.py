"""Clustering of workers by speed: one-dimensional and agglomerative, by measured seconds.

    span of a group    its slowest member's seconds / its fastest one's
    cluster_by_speed   start with one group per worker; join the two neighbours with the least common span,
                       while that is at most `max_ratio`
    recluster          keep the groups while every span is at most max_ratio · MARGIN and that of every two
                       neighbours together at least max_ratio / MARGIN; else cluster anew

So the gaps between groups are the largest ratios. As long as all seconds change by less than a factor of
√MARGIN, groups stay as they are: noise does not move workers back and forth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

MARGIN = 1.1
LEAST_S = 1e-9  # the resolution of a clock

Groups = list[list[int]]  # from the fastest group to the slowest; workers in order of their numbers


def cluster_by_speed(seconds: Mapping[int, float], max_ratio: float) -> Groups:
    """Make groups in which no member takes more than `max_ratio` times the seconds of another."""
    groups = [[worker] for worker in sorted(seconds, key=lambda worker: (seconds[worker], worker))]
    while len(groups) > 1:
        spans = [_span([one[0], other[-1]], seconds) for one, other in pairwise(groups)]
        least = min(range(len(spans)), key=spans.__getitem__)
        if spans[least] > max_ratio:
            break
        groups[least : least + 2] = [groups[least] + groups[least + 1]]
    return [sorted(group) for group in groups]


def recluster(groups: Sequence[Sequence[int]], seconds: Mapping[int, float], max_ratio: float) -> Groups:
    """Return the groups if they still fit; else new ones."""
    present = [[worker for worker in group if worker in seconds] for group in groups]
    present = [sorted(group) for group in present if group]
    ordered = sorted(present, key=lambda group: min(seconds[worker] for worker in group))
    alike = all(_span(group, seconds) <= max_ratio * MARGIN for group in ordered)
    unlike = all(_span([*one, *other], seconds) >= max_ratio / MARGIN for one, other in pairwise(ordered))
    return ordered if alike and unlike else cluster_by_speed(seconds, max_ratio)


def _span(group: Sequence[int], seconds: Mapping[int, float]) -> float:
    times = [max(LEAST_S, seconds[worker]) for worker in group]
    return max(times) / min(times)
