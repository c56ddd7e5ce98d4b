"""Shards that share their workers' NICs: what a step takes with all workers in phase, and out of phase.

In phase all push, then all pull, and every NIC is busy both ways. Out of phase two workers push while two
pull. Then a pusher sends at 0.6 of its NIC, because the other 0.4 answers the pullers, who receive at 0.6 of
theirs, because the other 0.4 is the pushers'. Nothing brings them back into phase where links are divided
evenly; where they have queues, workers return into it (test_queues.py).

With P shards on each host, weights of the first come down while the update for the next goes up: in phase
that changes nothing, out of phase it takes 1 + 2/(3P) instead of 5/3. With a server of its own a worker's
link is busy both ways, and a step takes 1 + 1/P instead of 2.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offbeat import ASP, GSSP, OSP, SSP
from offbeat.server.pieces import LEAST_BYTES
from offbeat.strategies.gssp import GDTopK
from offbeat.worlds.virtual.cluster import Cluster, ServerMachines, Slowdown, Workers
from offbeat.worlds.virtual.costs import ShardCost
from offbeat.worlds.virtual.messages import REQUEST_BYTES
from tests.support.virtual_runs import BYTES_PER_S, AnyStrategy, Kept, Run, cluster_of, play
from tests.support.virtual_servers import ONE_NIC, STEPS

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


def out_of_phase(pieces: int = 1) -> Cluster:
    factor = 1 + IN_PHASE_S / 2 / COMPUTE_S  # two workers begin half of an exchange later
    late = Slowdown(workers=(2, 3), from_s=0.0, until_s=COMPUTE_S / 2, factor=factor)
    return cluster_of(*[COMPUTE_S] * WORLD, slow=(late,), shards=ShardCost(pieces=pieces))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_out_of_phase_a_step_takes_five_thirds(strategy: AnyStrategy) -> None:
    assert pace_s(out_of_phase(), strategy) == pytest.approx(IN_PHASE_S * 5 / 3, rel=0.02)


# --- several shards on each host


@pytest.mark.parametrize("pieces", [2, 4])
def test_in_phase_pieces_cost_their_requests(pieces: int) -> None:
    cluster = cluster_of(*[COMPUTE_S] * WORLD, shards=ShardCost(pieces=pieces))
    requests_s = (WORLD - 1) * (pieces - 1) * REQUEST_BYTES / BYTES_PER_S
    assert pace_s(cluster, SSP(staleness=3)) == pytest.approx(IN_PHASE_S + requests_s, rel=1e-9)


@pytest.mark.parametrize("pieces", [2, 4])
def test_pieces_make_phases_cost_less(pieces: int) -> None:
    factor = pace_s(out_of_phase(pieces), SSP(staleness=3)) / IN_PHASE_S
    assert factor < 1.01 * (1 + 2 / (3 * pieces))


@pytest.mark.parametrize("pieces", [1, 2, 4])
@pytest.mark.parametrize("world", [1, 3])
def test_with_a_server_of_its_own_both_directions_are_busy(pieces: int, world: int) -> None:
    """Updates go up one after another; when the last is there, only its answer has yet to come down."""
    cluster = cluster_of(*[0.05] * world, server=ONE_NIC, shards=ShardCost(pieces=pieces))
    strategy = SSP(staleness=0, push="update")
    run = play(cluster, strategy, STEPS, task=Kept(dimension=FLOATS))
    up_s = world * (4 * FLOATS + pieces * REQUEST_BYTES) / BYTES_PER_S
    down_s = world * 4 * FLOATS / pieces / BYTES_PER_S
    assert run.seconds == pytest.approx(STEPS * (0.05 + up_s + down_s), rel=1e-9)


@pytest.mark.parametrize("strategy", [SSP(staleness=0), OSP(on="server")], ids=str)
def test_pieces_train_the_same_to_the_bit(strategy: AnyStrategy) -> None:
    def trained(pieces: int) -> Run:
        return play(cluster_of(0.05, 0.07, shards=ShardCost(pieces=pieces)), strategy, STEPS)

    whole, cut = trained(1), trained(3)
    assert all(map(torch.equal, whole.weights, cut.weights))
    assert [each.value for each in whole.history] == [each.value for each in cut.history]


@pytest.mark.parametrize("pieces", [1, 4], ids=["small", "large"])
def test_on_slow_links_a_large_model_is_cut_as_over_processes(pieces: int) -> None:
    floats = 2 * (LEAST_BYTES // 4) * pieces + 16 * (-1 if pieces == 1 else 1)

    def seconds(costs: ShardCost | None, **rest: Any) -> float:
        cluster = cluster_of(0.05, 0.05, shards=costs, **rest)
        return play(cluster, ASP(), 2, task=Kept(dimension=floats)).seconds

    assert seconds(None) == seconds(ShardCost(pieces=0))
    assert seconds(None) == seconds(ShardCost(pieces=pieces)) != seconds(ShardCost(pieces=2))
    own = {"server": ServerMachines(up_bits_per_s=1e6, down_bits_per_s=1e6)}
    assert seconds(None, **own) == seconds(ShardCost(pieces=1), **own), "whose links nobody knows"


@pytest.mark.parametrize(("bytes_per_s", "pieces"), [(5e6, 16), (5e7, 2), (2e8, 1)])
def test_the_faster_the_links_the_fewer_pieces(bytes_per_s: float, pieces: int) -> None:
    nic = Workers(step_s=0.05, up_bits_per_s=8 * bytes_per_s, down_bits_per_s=8 * bytes_per_s)

    def seconds(asked: int) -> float:
        cluster = Cluster(workers=(nic, nic), shards=ShardCost(pieces=asked))
        return play(cluster, ASP(), 2, task=Kept(dimension=1 << 19)).seconds

    assert seconds(0) == seconds(pieces)
    assert seconds(0) not in {seconds(other) for other in (pieces // 2 or 3, 2 * pieces)}


def test_sparse_packets_are_cut_by_their_own_size() -> None:
    """Pulled weights are in half precision: half as many pieces, each as long on its link."""
    nic = Workers(step_s=0.05, up_bits_per_s=8 * 5e7, down_bits_per_s=8 * 5e7)
    strategy = GSSP(groups="0,1", sparse=GDTopK(ratio=0.01, epoch_steps=10))

    def seconds(asked: int) -> float:
        cluster = Cluster(workers=(nic, nic), shards=ShardCost(pieces=asked))
        return play(cluster, strategy, 2, task=Kept(dimension=1 << 20)).seconds

    assert seconds(0) == seconds(2)
    assert seconds(0) not in {seconds(1), seconds(4)}
