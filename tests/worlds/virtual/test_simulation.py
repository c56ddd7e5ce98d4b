"""Virtual seconds, waits and bytes equal what can be worked out by hand, to the event."""

from __future__ import annotations

import pytest
import torch

from offbeat import BSP, LocalSGD
from offbeat.core.gradients import lay_out_gradients
from offbeat.core.replica import Replica
from offbeat.worlds.virtual.cluster import Absence, Slowdown
from offbeat.worlds.virtual.step_times import Measured, Trace
from tests.support.virtual_runs import MARKED, MIB, WEIGHTS, Kept, Layers, close, cluster_of, play, ring_s

pytestmark = pytest.mark.virtual


# --- BSP


def test_the_layout_is_as_counted() -> None:
    replica = Replica(Kept().build())
    lay_out_gradients(replica)
    assert [block.marked.nbytes for block in replica.blocks] == [MARKED]
    assert [flat.nbytes for flat in replica.weights] == [WEIGHTS]


def test_a_point_tells_the_mean_loss_of_the_steps_before_it() -> None:
    task = Kept(noise=0.0, lr=0.1)
    run = play(cluster_of(1.0, 1.0), BSP(), 6, task=task, evaluate_every=3)
    a = torch.linspace(1.0, 0.1, task.dimension, dtype=torch.float64)
    losses = [(a / 2 * (1 - task.lr * a) ** (2 * step)).sum().item() for step in range(6)]
    means = [sum(losses[:3]) / 3, sum(losses[3:]) / 3]
    assert [point.loss for point in run.history] == pytest.approx(means, rel=1e-5)


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("update_share", [0.0, 0.2])
def test_bsp_of_equal_workers(world: int, update_share: float) -> None:
    latency_s, operation_s = 1e-5, 3e-4
    cluster = cluster_of(
        *[0.05] * world, latency_s=latency_s, operation_s=operation_s, update_share=update_share
    )
    run = play(cluster, BSP(), 7, evaluate_every=1)
    reduce_s = ring_s(MARKED, world, latency_s, operation_s)
    assert [p.seconds for p in run.history] == [close(n * (0.05 + reduce_s)) for n in range(1, 8)]
    assert run.each("compute_s") == [close(7 * 0.05)] * world
    assert run.each("wait_s") == run.each("communicate_s") == [close(7 * reduce_s)] * world
    assert sum(run.each("bytes_sent")) == 7 * 2 * (world - 1) * MARKED
    shares = [MARKED // world + (rank < MARKED % world) for rank in range(world)]
    sent = [2 * MARKED - shares[(r + 1) % world] - shares[(r + 2) % world] for r in range(world)]
    assert run.each("bytes_sent") == [7 * nbytes for nbytes in sent]
    assert run.each("sync_steps") == [7] * world


def test_a_straggler_sets_the_tempo_of_bsp() -> None:
    run = play(cluster_of(0.1, 0.4, 0.2), BSP(), 5)
    reduce_s = ring_s(MARKED, 3)
    assert run.seconds == close(5 * (0.4 + reduce_s))
    assert run.each("compute_s") == [close(5 * s) for s in (0.1, 0.4, 0.2)]
    assert run.each("wait_s") == [close(5 * (0.4 - s + reduce_s)) for s in (0.1, 0.4, 0.2)]
    assert run.each("communicate_s") == run.each("wait_s"), "it is under way from when one has come"


def test_one_worker_alone_only_computes() -> None:
    run = play(cluster_of(Trace(trace_s=(1.0, 2.0, 4.0))), BSP(), 4, evaluate_every=1)
    assert [p.seconds for p in run.history] == [1.0, 3.0, 7.0, 8.0]
    assert run.each("bytes_sent") == run.each("wait_s") == run.each("communicate_s") == [0]


# --- several blocks: what hides behind backward


BLOCKS = [1 * MIB + 4, 8 * MIB + 4, 1 * MIB + 4]  # in backward order
READY = [0.25 + 0.75 * done for done in (0.1, 0.9, 1.0)]  # by bytes over backward, where forward is a quarter


@pytest.mark.parametrize(
    ("step_s", "hidden"), [(120.0, 2), (13.0, 1), (1.0, 0)], ids=["all but the last", "the first", "none"]
)
def test_bsp_overlaps_backward(step_s: float, hidden: int) -> None:
    """From the first block that is not sent by the time the next is ready, the network is what counts."""
    run = play(cluster_of(step_s, step_s, forward_share=0.25), BSP(), 2, task=Layers())
    reduce_s = [ring_s(nbytes, 2) for nbytes in BLOCKS]
    took = READY[hidden] * step_s + sum(reduce_s[hidden:])
    assert run.seconds == close(2 * took)
    assert run.each("wait_s") == [close(2 * (took - step_s))] * 2
    assert run.each("communicate_s") == [close(2 * sum(reduce_s))] * 2
    assert run.each("bytes_sent") == [2 * sum(BLOCKS)] * 2


def test_gradients_that_were_measured_late_do_not_make_a_step_longer() -> None:
    """A rank's last gradients may have been complete later than where, by all ranks, the update begins."""
    late = Measured(measured_s=(2.0,), ready=(0.5, 0.9, 0.95))
    run = play(cluster_of(late, late, update_share=0.1), BSP(), 3, task=Layers())
    assert run.each("compute_s") == [close(3 * 2.0)] * 2


@pytest.mark.parametrize("ratio", [0.25, 0.5, 1.0, 2.0])
def test_bsp_of_many_layers_waits_for_little_more_than_it_must(ratio: float) -> None:
    """C of computation, a third of it forward, and K = ratio·C of sending, in 12 blocks. Where the network is
    faster than backward a step takes C and the last block; where it is slower, it is idle until the first."""
    ring = ring_s(12 * MIB + 12 * 4, 2)
    step_s = ring / ratio
    run = play(cluster_of(step_s, step_s, forward_share=1 / 3), BSP(), 2, task=Layers(sizes_mib=(1,) * 12))
    hidden = step_s + ring / 12
    bare = step_s / 3 + 2 * step_s / 3 / 12 + ring
    assert run.seconds == close(2 * max(hidden, bare))


# --- LocalSGD


@pytest.mark.parametrize(("steps", "period"), [(12, 4), (11, 4), (3, 4), (5, 1)])
def test_local_sgd_of_equal_workers(steps: int, period: int) -> None:
    run = play(cluster_of(0.05, 0.05, 0.05, latency_s=1e-5), LocalSGD(period=period), steps)
    averages, average_s = steps // period, ring_s(WEIGHTS, 3, 1e-5)
    assert run.seconds == close(steps * 0.05 + averages * average_s)
    assert run.each("wait_s") == [close(averages * average_s)] * 3
    assert run.each("bytes_sent") == [averages * 4 * WEIGHTS // 3] * 3
    assert run.each("sync_steps") == [averages] * 3
    assert run.each("local_steps") == [steps - averages] * 3


def test_local_sgd_of_unequal_workers() -> None:
    """All leave an average at once: the slowest stretch between two of them counts, not the slowest step."""
    traces = [(1.0, 5.0, 1.0, 1.0), (3.0, 1.0, 2.0, 3.0)]  # sums by two: 6 and 2; 4 and 5
    run = play(cluster_of(*(Trace(trace_s=t) for t in traces)), LocalSGD(period=2), 4)
    average_s = ring_s(WEIGHTS, 2)
    assert run.seconds == close(6 + average_s + 5 + average_s)
    assert run.each("compute_s") == [close(8.0), close(9.0)]
    assert run.each("wait_s") == [close(0 + 3 + 2 * average_s), close(2 + 0 + 2 * average_s)]
    assert run.each("communicate_s") == run.each("wait_s")


# --- slowness, absence


def test_slowness_and_absence_shift_bsp_by_exactly_that() -> None:
    plain = play(cluster_of(1.0, 1.0), BSP(), 10)
    slow = Slowdown(workers=(1,), from_s=2.5, until_s=4.5, factor=3)
    slowed = play(cluster_of(1.0, 1.0, slow=(slow,)), BSP(), 10)
    # the third step begins before 2.5 s, the fourth just after 3 s, the next when that one ends, after 6 s
    assert slowed.seconds == close(plain.seconds + 2)
    away = (Absence(worker=0, from_s=2.5, until_s=7), Absence(worker=0, from_s=7, until_s=8.25))
    returned = play(cluster_of(1.0, 1.0, away=away), BSP(), 10)
    began = 3 * (1 + ring_s(MARKED, 2))
    assert returned.seconds == close(plain.seconds + 8.25 - began)
    assert returned.each("wait_s")[1] == close(plain.each("wait_s")[1] + 8.25 - began)


def test_time_changes_no_weight_of_bsp() -> None:
    """Whoever is slow or away, a step's samples and noise are its own."""
    slow, away = Slowdown(workers=(1,), factor=3), Absence(worker=0, from_s=1.5, until_s=7)
    plain = play(cluster_of(1.0, 1.0), BSP(), 4)
    for elsewhen in ({"slow": (slow,)}, {"away": (away,)}):
        run = play(cluster_of(1.0, 1.0, **elsewhen), BSP(), 4)
        assert run.seconds > plain.seconds
        assert all(map(torch.equal, run.weights, plain.weights))
