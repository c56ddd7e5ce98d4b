"""Facts of a trace of spot machines: how long they are there, and how often they are taken away.

mean life = time available / preemptions         over all nodes
independent = Π_k (1 − share_k)                  of the time no node would be there, were they independent
"""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean

from offbeat.worlds.virtual.spot_trace import SpotTrace

HOUR_S, DAY_S = 3600.0, 86400.0
FACTS = (
    "trace",
    "days",
    "seconds of an entry",
    "nodes",
    "time available (%)",
    "preemptions",
    "mean life (h)",
    "no node there (% of the time)",
    "the same if nodes were independent",
)


def describe(trace: SpotTrace) -> list[str]:
    """Write the facts of a trace; node k is there while more than k machines are."""
    nodes = [[machines > node for machines in trace.available] for node in range(max(trace.available))]
    shares = [fmean(there) for there in nodes]
    lost = sum(before and not after for there in nodes for before, after in pairwise(there))
    return [
        f"{trace.seconds / DAY_S:.1f}",
        f"{trace.gap_s:g}",
        str(len(nodes)),
        f"{100 * fmean(shares):.1f}",
        str(lost),
        f"{sum(shares) * trace.seconds / HOUR_S / lost:.2f}" if lost else "–",
        f"{100 * trace.available.count(0) / len(trace.available):.1f}",
        f"{100 * math.prod(1 - share for share in shares):.2g}",
    ]
