"""Grouping: which workers are of like speed. Pure functions of measured seconds.

    span of a group   its slowest member's seconds / its fastest one's
    grouped           start with a group each; join the two neighbours whose common span is the least, while
                      it is at most `likeness`
    regrouped         the groups stay while every span is at most likeness · MARGIN and that of every two
                      neighbours together at least likeness / MARGIN; else group anew

So what is left apart after joining are the largest ratio gaps. Groups whose seconds each change by less than
a factor of √MARGIN stay as they are, whatever they are: noise does not make workers go to and fro.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

MARGIN = 1.1
LEAST_S = 1e-9  # a clock's grain: nothing is faster

Groups = list[
    list[int]
]  # workers, each group in order of their numbers; from the fastest group to the slowest


def cluster_by_speed(seconds: Mapping[int, float], likeness: float) -> Groups:
    """Groups from the fastest to the slowest: in none takes a member more than `likeness` times another's."""
    groups = [[worker] for worker in sorted(seconds, key=lambda worker: (seconds[worker], worker))]
    while len(groups) > 1:
        spans = [_span([one[0], other[-1]], seconds) for one, other in pairwise(groups)]
        least = min(range(len(spans)), key=spans.__getitem__)
        if spans[least] > likeness:
            break
        groups[least : least + 2] = [groups[least] + groups[least + 1]]
    return [sorted(group) for group in groups]


def recluster(groups: Sequence[Sequence[int]], seconds: Mapping[int, float], likeness: float) -> Groups:
    """The groups that there are, if they still fit; else new ones."""
    there = [[worker for worker in group if worker in seconds] for group in groups]
    there = [sorted(group) for group in there if group]
    apart = sorted(there, key=lambda group: min(seconds[worker] for worker in group))
    alike = all(_span(group, seconds) <= likeness * MARGIN for group in apart)
    unlike = all(_span([*one, *other], seconds) >= likeness / MARGIN for one, other in pairwise(apart))
    return apart if alike and unlike else cluster_by_speed(seconds, likeness)


def _span(group: Sequence[int], seconds: Mapping[int, float]) -> float:
    times = [max(LEAST_S, seconds[worker]) for worker in group]
    return max(times) / min(times)
