"""A parameter server in virtual time: to the event where that can be worked out, else bounded."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat import ASP, BSP, DSSP, SSP
from offbeat.server.sharding import split_shards
from offbeat.worlds.virtual import simulation as virtual
from offbeat.worlds.virtual.cluster import Absence, Cluster, ServerMachines
from offbeat.worlds.virtual.messages import REQUEST_BYTES
from offbeat.worlds.virtual.server import VirtualServer
from tests.support.virtual_runs import (
    BYTES_PER_S,
    WEIGHTS,
    AnyStrategy,
    Run,
    close,
    cluster_of,
    keep_spans,
    play,
)
from tests.support.virtual_servers import (
    ASK_S,
    ONE_NIC,
    SEND_S,
    STEPS,
    TRIP_S,
    WIDE,
    accuracy,
    clusters,
)

pytestmark = pytest.mark.virtual

LOCK_STEP = [
    ASP(overlap=False),
    SSP(staleness=0),
    SSP(staleness=2, overlap=False),
    DSSP(low=0, high=2),
    DSSP(low=1, high=2, overlap=False),
]
OVERLAPPING = [ASP(), SSP(staleness=1), SSP(staleness=2), DSSP(low=1, high=2)]


# --- equal workers


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("strategy", LOCK_STEP, ids=str)
def test_a_server_behind_one_nic(strategy: AnyStrategy, world: int) -> None:
    """All push at once, then all ask, then all are answered: N packets each time through one NIC."""
    run = play(cluster_of(*[0.05] * world, server=ONE_NIC), strategy, STEPS)
    assert run.seconds == close(STEPS * (0.05 + world * TRIP_S))
    assert run.each("compute_s") == [close(STEPS * 0.05)] * world
    assert run.each("wait_s") == run.each("communicate_s") == [close(STEPS * world * TRIP_S)] * world
    assert run.each("bytes_sent") == [STEPS * (WEIGHTS + REQUEST_BYTES)] * world
    assert run.each("bytes_left_host") == run.each("bytes_sent")
    assert run.each("bytes_server") == [STEPS * WEIGHTS] * world, "the answers to the pulls"
    assert run.each("sync_steps") == [STEPS] * world


@pytest.mark.parametrize("world", [1, 2])
def test_a_request_follows_its_push_at_once_and_only_two_latencies_count(world: int) -> None:
    """As on a connection: there with the push, and back with the weights. An operation costs as much each."""
    far = replace(ONE_NIC, latency_s=0.3)
    cluster = cluster_of(*[0.05] * world, server=far, operation_s=0.01)
    run = play(cluster, SSP(staleness=0), STEPS, prepare=keep_spans)
    assert run.seconds == close(STEPS * (0.05 + world * TRIP_S + 2 * (0.3 + 0.01)))


def test_a_receipt_takes_its_way_back() -> None:
    far = replace(ONE_NIC, latency_s=0.3)
    run = play(cluster_of(0.05, server=far), SSP(staleness=0), 1, prepare=keep_spans)
    spans = {span.kind: span.end_s - span.start_s for span in run.ledgers[0].spans or ()}
    assert spans["push"] == close(SEND_S + 2 * 0.3)
    assert spans["pull"] == close(ASK_S + SEND_S + 2 * 0.3)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("strategy", LOCK_STEP, ids=str)
def test_shards_beside_the_workers_use_every_nic(strategy: AnyStrategy, world: int) -> None:
    """Each keeps a share to itself; of the others' N − 1 it pushes, asks and answers."""
    run = play(cluster_of(*[0.05] * world), strategy, STEPS)
    sent = (world - 1) * (2 * WEIGHTS // world + REQUEST_BYTES)
    assert run.seconds == close(STEPS * (0.05 + sent / BYTES_PER_S))
    kept = 2 * WEIGHTS // world  # the share, there and back
    assert run.each("bytes_sent") == [STEPS * (sent + kept)] * world
    assert run.each("bytes_left_host") == [STEPS * sent] * world
    assert run.each("bytes_server") == [0] * world, "the shards' bytes are their workers'"


@pytest.mark.parametrize("compute_s", [0.05, 0.005], ids=["hidden", "exposed"])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("strategy", OVERLAPPING, ids=str)
def test_pulls_travel_behind_the_next_step(strategy: AnyStrategy, world: int, compute_s: float) -> None:
    """A step takes as long as computing or communicating, whichever takes longer; the first has nothing to
    wait for, and what is under way after the last one is waited for."""
    run = play(cluster_of(*[compute_s] * world, server=ONE_NIC), strategy, STEPS)
    trip_s = world * TRIP_S
    seconds = compute_s + (STEPS - 1) * max(compute_s, trip_s) + trip_s
    assert run.seconds == close(seconds)
    assert run.each("compute_s") == [close(STEPS * compute_s)] * world
    assert run.each("wait_s") == [close(seconds - STEPS * compute_s)] * world
    assert run.each("communicate_s") == [close(STEPS * trip_s)] * world
    assert run.each("bytes_sent") == [STEPS * (WEIGHTS + REQUEST_BYTES)] * world
    if strategy == SSP(staleness=1):
        assert all(ledger.totals().staleness == {"1": STEPS} for ledger in run.ledgers), "in lock step"


@pytest.mark.parametrize("server", [None, ONE_NIC, replace(ONE_NIC, count=3)], ids=["beside", "one", "three"])
@pytest.mark.parametrize("step_s", [(0.1, 0.1, 0.1), (0.1, 0.4, 0.2)], ids=["equal", "unequal"])
def test_without_staleness_it_is_bsp(server: ServerMachines | None, step_s: tuple[float, ...]) -> None:
    ours = play(cluster_of(*step_s, server=server), SSP(staleness=0), 10)
    bsp = play(cluster_of(*step_s), BSP(), 10)
    for weights in ours.weights:
        assert torch.equal(weights, ours.weights[0])
        torch.testing.assert_close(weights, bsp.weights[0], rtol=0, atol=1e-5)
    assert all(ledger.totals().staleness == {"0": 10} for ledger in ours.ledgers)


# --- a straggler


def test_asp_never_waits_for_a_straggler() -> None:
    run = play(cluster_of(0.1, 0.4, 0.1, server=WIDE), ASP(overlap=False), 20)
    assert run.each("wait_s") == [close(20 * TRIP_S)] * 3
    assert [ledger.seconds for ledger in run.ledgers] == [close(20 * (s + TRIP_S)) for s in (0.1, 0.4, 0.1)]
    fast, slow = run.ledgers[0].totals(), run.ledgers[1].totals()
    assert slow.staleness == {"0": 20}, "nobody is slower than the slowest"
    assert fast.staleness_max == 20 - 5, "when it ends, the straggler has pushed five times"
    assert fast.staleness_mean == close(sum(int(k) * n for k, n in fast.staleness.items()) / 20)


def test_asp_that_overlaps_waits_for_nothing() -> None:
    run = play(cluster_of(0.1, 0.4, 0.1, server=WIDE), ASP(), 20)
    assert run.each("wait_s") == [close(TRIP_S)] * 3, "for what is under way in the end"
    assert [ledger.seconds for ledger in run.ledgers] == [close(20 * s + TRIP_S) for s in (0.1, 0.4, 0.1)]
    assert run.ledgers[1].totals().staleness == {"1": 20}, "its next step will not see its next push"


def test_ssp_waits_for_a_straggler_beyond_its_bound() -> None:
    """From the fifth step on the fast one is let on when the slow one, which waits for nobody, has pushed for
    the third last time before: it ends three of the slow one's steps early."""
    steps = 12
    run = play(cluster_of(1.0, 4.0, server=WIDE), SSP(staleness=3, overlap=False), steps)
    fast, slow = (ledger.totals() for ledger in run.ledgers)
    assert slow.seconds == close(steps * (4 + TRIP_S))
    assert slow.wait_s == close(steps * TRIP_S)
    assert fast.seconds == close((steps - 3) * (4 + TRIP_S))
    assert fast.wait_s == close((steps - 3) * (4 + TRIP_S) - steps * 1.0)
    assert fast.staleness == {"1": 1, "2": 1, "3": steps - 2}
    assert (fast.staleness_max, slow.staleness) == (3, {"0": steps})
    assert run.seconds == slow.seconds, "a step is done when the slowest has done it"


def test_ssp_that_overlaps_waits_for_a_straggler_beyond_its_bound() -> None:
    """After its step c the fast one asks for weights of which it will make step c + 1: it gets them when the
    slow one, whose own trips are hidden, has pushed c − 2 times. After the last step, too."""
    steps = 12
    run = play(cluster_of(1.0, 4.0, server=WIDE), SSP(staleness=3), steps)
    fast, slow = (ledger.totals() for ledger in run.ledgers)
    assert slow.seconds == close(steps * 4 + TRIP_S)
    assert slow.wait_s == close(TRIP_S)
    assert fast.seconds == close((steps - 2) * 4 + TRIP_S)
    assert fast.wait_s == close((steps - 2) * 4 + TRIP_S - steps * 1.0)
    assert fast.staleness == {"2": 1, "3": steps - 1}
    assert slow.staleness == {"1": steps}
    assert run.seconds == slow.seconds


def test_dssp_runs_further_ahead_where_pushes_will_meet() -> None:
    """1 s against 2 s: at the first gap of 4 both have just pushed, and will again after two of its steps."""
    cluster = cluster_of(1.0, 2.0, server=WIDE)
    ssp, dssp = play(cluster, SSP(staleness=3), 9), play(cluster, DSSP(low=3, high=9), 9)
    assert dssp.each("wait_s")[0] < ssp.each("wait_s")[0]
    assert 3 < dssp.ledgers[0].totals().staleness_max <= 9


@pytest.mark.parametrize("strategy", [ASP(overlap=False), SSP(staleness=2, overlap=False)], ids=str)
def test_one_who_is_away_is_forgotten_and_reads_anew_when_it_comes_back(strategy: AnyStrategy) -> None:
    away = (Absence(worker=1, from_s=2.5, until_s=20.0),)
    run = play(cluster_of(1.0, 1.0, server=WIDE, away=away), strategy, 8)
    there, back = (ledger.totals() for ledger in run.ledgers)
    assert run.ledgers[0].seconds == close(8 * (1 + TRIP_S)), "it waits for nobody who is not here"
    read_s = ASK_S + SEND_S
    assert run.seconds == close(20.0 + read_s + 5 * (1 + TRIP_S)), "it left after its third step"
    assert there.staleness_max <= 1
    assert back.steps == 8 and back.staleness_max <= 2


@pytest.mark.parametrize("strategy", [ASP(), SSP(staleness=1), DSSP(low=1, high=3)], ids=str)
def test_one_who_left_for_good_ends_no_run(strategy: AnyStrategy) -> None:
    away = (Absence(worker=1, from_s=2.5, until_s=math.inf),)
    run = play(cluster_of(1.0, 1.0, 1.0, server=WIDE, away=away), strategy, 8)
    assert run.each("steps") == [8, 3, 8]
    assert run.history[-1].step == 8


def test_a_reply_under_way_is_not_changed_by_what_comes_later() -> None:
    """Worker 1's push arrives while worker 0's reply travels, or long after it."""
    just_then = 1.0 + ASK_S + SEND_S / 2
    during, after = (play(cluster_of(1.0, s, server=WIDE), ASP(overlap=False), 1) for s in (just_then, 5.0))
    assert torch.equal(during.weights[0], after.weights[0])
    assert torch.equal(during.weights[1], after.weights[1]), "which holds both"
    assert not torch.equal(during.weights[0], during.weights[1])


# --- looking on


@pytest.mark.parametrize(
    "strategy",
    [ASP(overlap=False), SSP(staleness=1, overlap=False), DSSP(low=0, high=3), SSP(staleness=1)],
    ids=str,
)
def test_worker_0_looks_alone_and_changes_nothing(strategy: AnyStrategy) -> None:
    cluster = cluster_of(0.1, 0.25, 0.13)
    often, once = (play(cluster, strategy, 9, evaluate_every=n) for n in (1, 100))
    assert [point.step for point in often.history] == list(range(1, 10))
    assert all(map(torch.equal, often.weights, once.weights))
    assert often.history[-1].value == once.history[-1].value
    assert often.seconds == close(once.seconds)
    for ours, theirs in zip(often.ledgers, once.ledgers, strict=True):
        one, other = ours.totals(), theirs.totals()
        assert (one.bytes_sent, one.staleness, one.sync_steps) == (
            other.bytes_sent,
            other.staleness,
            other.sync_steps,
        )
        assert (one.wait_s, one.communicate_s) == (close(other.wait_s), close(other.communicate_s))


# --- any cluster

BOUNDS = {
    ASP(): STEPS + 1,  # of what is used at the next step
    ASP(overlap=False): STEPS,
    SSP(staleness=0): 0,
    SSP(staleness=1): 1,
    SSP(staleness=2): 2,
    SSP(staleness=2, overlap=False): 2,
    DSSP(low=0, high=3): 3,
    DSSP(low=1, high=1): 1,
    DSSP(low=1, high=3): 3,
    DSSP(low=2, high=3): 3,
}


class Watched(VirtualServer):
    returns = 0

    def join(self, worker: int) -> None:
        self.returns += 1
        super().join(worker)


def watched(cluster: Cluster, strategy: AnyStrategy) -> tuple[Run, Watched]:
    servers: list[Watched] = []

    def made(*args: Any) -> VirtualServer:
        servers.append(Watched(*args))
        return servers[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(virtual, "VirtualServer", made)
        return play(cluster, strategy, STEPS), servers[0]


@settings(max_examples=40, deadline=None)
@given(clusters, st.sampled_from(sorted(BOUNDS, key=str)))
def test_staleness_is_bounded_and_no_byte_is_lost(cluster: Cluster, strategy: AnyStrategy) -> None:
    run, server = watched(cluster, strategy)
    world = cluster.size
    if cluster.server:
        expected = STEPS * world * (2 * WEIGHTS + cluster.server.count * REQUEST_BYTES)
    else:
        expected = STEPS * (world - 1) * (2 * WEIGHTS + world * REQUEST_BYTES)
    if server.returns:  # worker 0 reads the weights anew
        (own,) = split_shards([torch.zeros(WEIGHTS // 4)], world)[0]
        beside = (world - 1) * REQUEST_BYTES + WEIGHTS - own.nbytes
        expected += WEIGHTS + cluster.server.count * REQUEST_BYTES if cluster.server else beside
    assert sum(run.each("bytes_left_host")) + sum(run.each("bytes_server")) == expected
    for ledger in run.ledgers:
        entry = ledger.totals()
        assert entry.steps == sum(entry.staleness.values()) == STEPS
        assert entry.staleness_max <= BOUNDS[strategy]
        assert 0 <= entry.wait_s <= ledger.seconds * (1 + 1e-9)
        assert entry.communicate_s <= ledger.seconds * (1 + 1e-9)
    again, _ = watched(cluster, strategy)
    assert again.history == run.history
    assert all(map(torch.equal, again.weights, run.weights))
    assert [one.totals() for one in again.ledgers] == [one.totals() for one in run.ledgers]


# --- it trains


@pytest.mark.parametrize("strategy", [ASP(), SSP(staleness=3), DSSP()], ids=str)
def test_digits_come_within_a_point_of_bsp(strategy: AnyStrategy) -> None:
    """The last worker is four times slower; tests/conformance/test_training.py has about equal ones."""
    bsp = accuracy(BSP(), 0.05)
    assert bsp >= 0.97
    assert accuracy(strategy, 0.2) >= bsp - 0.01
