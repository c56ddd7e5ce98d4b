"""Shards that share their workers' NICs: what a step takes with all workers in phase, and out of phase.

In phase all push, then all pull, and every NIC is busy both ways. Out of phase two workers push while two
pull. Then a pusher sends at 0.6 of its NIC, because the other 0.4 answers the pullers, who receive at 0.6 of
theirs, because the other 0.4 is the pushers'. Nothing brings them back into phase.
"""

from __future__ import annotations

import pytest

from offbeat import ASP, SSP
from offbeat.worlds.virtual.cluster import Cluster, Slowdown
from offbeat.worlds.virtual.messages import REQUEST_BYTES
from tests.support.virtual_runs import BYTES_PER_S, AnyStrategy, Kept, cluster_of, play

pytestmark = pytest.mark.virtual

WORLD = 4
FLOATS = 16_000  # so many that requests count for little
COMPUTE_S = 0.001  # hidden behind the exchange
IN_PHASE_S = (WORLD - 1) * (2 * 4 * FLOATS // WORLD + REQUEST_BYTES) / BYTES_PER_S  # all that a NIC sends
STRATEGIES = [ASP(), SSP(staleness=3)]


def pace_s(cluster: Cluster, strategy: AnyStrategy) -> float:
    """Return the seconds per step, from step 20 to step 30."""
    early, late = (play(cluster, strategy, n, task=Kept(dimension=FLOATS)).seconds for n in (20, 30))
    return (late - early) / 10


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_in_phase_every_nic_is_busy_both_ways(strategy: AnyStrategy) -> None:
    assert pace_s(cluster_of(*[COMPUTE_S] * WORLD), strategy) == pytest.approx(IN_PHASE_S, rel=1e-9)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_out_of_phase_a_step_takes_five_thirds(strategy: AnyStrategy) -> None:
    factor = 1 + IN_PHASE_S / 2 / COMPUTE_S  # two workers begin half of an exchange later
    late = Slowdown(workers=(2, 3), from_s=0.0, until_s=COMPUTE_S / 2, factor=factor)
    cluster = cluster_of(*[COMPUTE_S] * WORLD, slow=(late,))
    assert pace_s(cluster, strategy) == pytest.approx(IN_PHASE_S * 5 / 3, rel=0.02)
