"""Slow start after idle: closed forms, and nothing lost without latency or on busy connections."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offbeat import ASP, BSP
from offbeat.worlds.virtual.tcp import FIRST_WINDOW, slow_start_s
from tests.support.virtual_runs import BYTES_PER_S, MARKED, Kept, close, cluster_of, play, ring_s
from tests.support.virtual_servers import ASK_S, WIDE

pytestmark = pytest.mark.virtual

W = FIRST_WINDOW


@pytest.mark.parametrize(
    ("nbytes", "rounds"),
    [(W, 0), (W + 1, 1), (3 * W, 1), (3 * W + 1, 2), (7 * W + 1, 3), (1000 * W, 3)],
)
def test_rounds_until_the_bytes_are_sent_or_the_link_is_full(nbytes: int, rounds: int) -> None:
    """The link carries 8 windows in a round trip, so the fourth round, of 8 windows, is not slow."""
    rtt_s, rate = 0.1, 8 * W / 0.1
    assert slow_start_s(nbytes, rate, rtt_s) == close(rounds * rtt_s - (2**rounds - 1) * W / rate)


def test_nothing_is_lost_without_latency_or_where_a_window_fills_the_link() -> None:
    assert slow_start_s(1e9, 1e9, 0.0) == 0
    assert slow_start_s(1e9, W / 0.1, 0.1) == 0


LATENCY_S = 0.1  # 0.2 s there and back
DIMENSION = 25_000
NBYTES = 4 * (25_008 + 1)


def ring_step_s(step_s: float, slow: bool) -> float:
    lost_s = slow_start_s(NBYTES, BYTES_PER_S, 2 * LATENCY_S) if slow else 0.0  # of two: each NIC sends all
    return step_s + ring_s(NBYTES, 2, LATENCY_S) + lost_s


@pytest.mark.parametrize(("step_s", "idle"), [(0.5, True), (0.3, False)])
def test_a_ring_after_idle_steps(step_s: float, idle: bool) -> None:
    """After 0.4 s without traffic a connection starts anew; the first operation always does."""
    assert slow_start_s(NBYTES, BYTES_PER_S, 2 * LATENCY_S) > 0.1
    run = play(cluster_of(step_s, step_s, latency_s=LATENCY_S), BSP(), 3, task=Kept(dimension=DIMENSION))
    assert run.seconds == close(ring_step_s(step_s, True) + 2 * ring_step_s(step_s, idle))
    free = replace(cluster_of(step_s, step_s, latency_s=LATENCY_S), slow_start=False)
    run = play(free, BSP(), 3, task=Kept(dimension=DIMENSION))
    assert run.seconds == close(3 * ring_step_s(step_s, False))


def test_a_push_and_a_reply_after_idle() -> None:
    """Each direction is idle while the worker computes. The request of the pull arrives with its push."""
    cluster = cluster_of(1.0, latency_s=LATENCY_S, server=WIDE)
    slow = play(cluster, ASP(overlap=False), 2, task=Kept(dimension=DIMENSION))
    fast = play(replace(cluster, slow_start=False), ASP(overlap=False), 2, task=Kept(dimension=DIMENSION))
    lost_s = slow_start_s(NBYTES - 4, BYTES_PER_S, 2 * LATENCY_S)
    assert slow.seconds - fast.seconds == close(2 * (2 * lost_s - ASK_S))


def test_small_models_lose_nothing() -> None:
    assert MARKED < FIRST_WINDOW
    cluster = cluster_of(1.0, 1.0, latency_s=LATENCY_S)
    assert play(cluster, BSP(), 2).seconds == play(replace(cluster, slow_start=False), BSP(), 2).seconds
