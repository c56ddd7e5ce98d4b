"""Copies of virtual shards: what they send, and what waits for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from offbeat import ASP, DSSP, GSSP, OSP, SSP, OffbeatError, Oscars, SettingError
from offbeat.codecs import Half
from offbeat.worlds.virtual.cluster import Absence, Cluster
from offbeat.worlds.virtual.costs import ShardCost
from offbeat.worlds.virtual.messages import REQUEST_BYTES
from tests.support.virtual_runs import MIB, WEIGHTS, AnyStrategy, Layers, Run, cluster_of, play
from tests.support.virtual_servers import ASK_S, ONE_NIC, SEND_S, STEPS, WIDE

pytestmark = pytest.mark.virtual

TWO = replace(ONE_NIC, count=2)
COPIED = ShardCost(copies=1, pieces=1)
LOCK_STEP = [ASP(overlap=False), SSP(staleness=0)]


def about(seconds: float, tolerance: float = 1e-6) -> Any:
    return pytest.approx(seconds, rel=tolerance)


def each_step_s(run: Run) -> float:
    return run.seconds / STEPS - 0.05


@pytest.mark.parametrize("latency_s", [0.0, 0.3])
@pytest.mark.parametrize("strategy", LOCK_STEP, ids=str)
def test_a_pull_waits_until_the_push_before_it_is_copied(strategy: AnyStrategy, latency_s: float) -> None:
    """Halves go to two servers, from there to the other one, whose receipt comes back; then halves come down.

    Requests are already there, but for links without latency: there they share the servers' downlinks with
    the copies.
    """
    far = replace(TWO, latency_s=latency_s)
    (slow,) = cluster_of(0.05).workers
    wide = replace(slow, up_bits_per_s=1e12, down_bits_per_s=1e12)
    cluster = Cluster(workers=(wide,), server=far, slow_start=False)
    alone = play(cluster, strategy, STEPS)
    run = play(replace(cluster, shards=COPIED), strategy, STEPS)
    half_s, asked_s = SEND_S / 2, 0.0 if latency_s else ASK_S
    assert each_step_s(alone) == about(2 * half_s + ASK_S + 2 * latency_s)
    assert each_step_s(run) == about(3 * half_s + asked_s + 4 * latency_s)
    assert run.each("bytes_sent") == alone.each("bytes_sent") == [STEPS * (WEIGHTS + 2 * REQUEST_BYTES)]
    assert alone.each("bytes_server") == [STEPS * WEIGHTS]
    assert run.each("bytes_server") == [STEPS * 2 * WEIGHTS], "answers, and copies"
    assert torch.equal(run.weights[0], alone.weights[0])


@pytest.mark.parametrize("strategy", LOCK_STEP, ids=str)
def test_beside_two_workers_every_uplink_is_busy_until_the_end(strategy: AnyStrategy) -> None:
    """Each sends half an update, copies its own worker's half and the other's, asks and answers."""
    run = play(cluster_of(0.05, 0.05, shards=COPIED), strategy, STEPS)
    assert each_step_s(run) == about(2 * SEND_S + ASK_S)
    assert run.each("bytes_left_host") == [STEPS * (2 * WEIGHTS + REQUEST_BYTES)] * 2
    assert run.each("bytes_sent") == [STEPS * (3 * WEIGHTS + REQUEST_BYTES)] * 2, "and its own halves"


def test_updates_that_come_while_a_batch_is_under_way_are_the_next_batch() -> None:
    """Three workers' updates come together. The first is sent alone; the second and third share its second
    round trip, instead of having a third."""
    far = replace(WIDE, count=2, latency_s=0.3)
    run = play(cluster_of(*[0.05] * 3, server=far, slow_start=False, shards=COPIED), SSP(staleness=0), STEPS)
    assert each_step_s(run) == about(2 * SEND_S + 0.3 * (2 + 2 + 2), tolerance=1e-3)


def test_a_barrier_copies_the_mean_of_all_pushes_once() -> None:
    cluster = cluster_of(0.05, 0.05, 0.05, server=TWO, shards=COPIED)
    run = play(cluster, SSP(staleness=0, push="gradient"), STEPS, task=Layers(sizes_mib=(1,)))
    assert sum(run.each("bytes_server")) == STEPS * (3 + 1) * MIB, "three answers, and one copy"


def test_an_update_travels_uncompressed_to_the_copy() -> None:
    run = play(cluster_of(0.05, server=TWO, shards=COPIED), ASP(codec=Half()), STEPS)
    assert run.each("bytes_sent") == [STEPS * (WEIGHTS // 2 + 2 * REQUEST_BYTES)]
    assert run.each("bytes_server") == [STEPS * 2 * WEIGHTS]


@pytest.mark.parametrize(
    "strategy", [ASP(), SSP(staleness=2), DSSP(), GSSP(window=2), Oscars(tau=2)], ids=str
)
@pytest.mark.parametrize("pieces", [1, 3])
def test_every_strategy_trains_with_copies_while_workers_come_and_go(
    strategy: AnyStrategy, pieces: int
) -> None:
    away = (Absence(worker=2, from_s=0.12, until_s=0.4),)
    cluster = cluster_of(0.05, 0.07, 0.09, away=away, shards=replace(COPIED, pieces=pieces))
    run, again = (play(cluster, strategy, 3 * STEPS) for _ in range(2))
    assert run.each("steps") == [3 * STEPS] * 3
    assert run.history == again.history
    assert run.history[-1].value < 0.9 * play(cluster, strategy, 1).history[-1].value


def test_the_copy_is_applied_by_its_host_after_what_that_has_begun() -> None:
    apply_s = 1e-5
    shards = replace(COPIED, apply_s=apply_s)
    cluster = cluster_of(0.05, server=TWO)
    run = play(replace(cluster, shards=shards), ASP(overlap=False), STEPS)
    free = play(replace(cluster, shards=COPIED), ASP(overlap=False), STEPS)
    half = WEIGHTS / 2 * apply_s  # at the shard, and then at its copy
    assert each_step_s(run) == pytest.approx(each_step_s(free) + 2 * half, abs=2 * ASK_S)


def test_what_cannot_be_copied_is_refused() -> None:
    with pytest.raises(SettingError, match="needs two hosts"):
        play(cluster_of(0.05, 0.05, server=ONE_NIC, shards=COPIED), ASP(), 1)
    with pytest.raises(OffbeatError, match="cannot keep copies of its shards"):
        play(cluster_of(0.05, 0.05, shards=COPIED), OSP(on="server"), 1)
