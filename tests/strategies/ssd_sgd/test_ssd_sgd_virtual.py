"""SSD-SGD in virtual time: missing gradients, whole parameters, seconds and bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import SGD

from offbeat import BSP, SSDSGD
from offbeat.worlds.virtual.step_times import Trace
from tests.support.ssd_sgd_runs import (
    SIZE,
    WEIGHTS,
    WORLD,
    Given,
    Normalised,
    point,
    run,
    same,
    shown,
    varied,
)
from tests.support.virtual_runs import BYTES_PER_S, close, cluster_of, play, ring_s

pytestmark = pytest.mark.virtual


# --- the rule


@pytest.mark.parametrize(
    "strategy",
    [
        SSDSGD(warmup=2, delay=100, staggered=False),
        SSDSGD(warmup=2, delay=3),
        SSDSGD(on="server", warmup=2, delay=3),
        SSDSGD(rule="authors", warmup=2, delay=3),
        SSDSGD(rule="authors", on="server", warmup=2, delay=3),
    ],
    ids=str,
)
def test_a_parameter_without_gradient_keeps_still_and_the_others_gradient_counts_half(
    strategy: SSDSGD,
) -> None:
    """Weight decay is on. Worker 1 lacks a gradient in step 4, worker 0 in step 7, both in step 6."""
    ones = torch.ones(SIZE, dtype=torch.float64)
    without = {4: (1,), 6: (0, 1), 7: (0,)}
    task = Given(
        grads=lambda worker, step: None if worker in without.get(step, ()) else ones,
        rates=lambda _: 0.5,
        make=lambda p: SGD(p, lr=0.5, weight_decay=0.5),
    )
    w_loc, w_glob = run(strategy, task, 10)
    expected = [torch.zeros(SIZE, dtype=torch.float64)]
    for step in range(10):
        share = 1 - len(without.get(step, ())) / 2
        w = expected[-1]
        expected.append(w - 0.5 * (share * ones + 0.5 * w) if share else w)
    same(w_glob, shown(expected, strategy, 1))
    for step, workers in without.items() if strategy.delay == 100 else ():  # where nothing is pulled
        for worker in range(WORLD):
            still = torch.equal(w_loc[worker][step], w_loc[worker][step + 1])
            assert still == (worker in workers)


# --- shares of whole parameters


def test_an_optimizer_that_needs_whole_parameters_gets_them() -> None:
    numels = (8, 16, 24)
    task = Given(grads=varied, rates=lambda _: 0.1, make=lambda p: Normalised(p, lr=0.1), numels=numels)
    strategy = SSDSGD(warmup=0, delay=2, staggered=False)
    w_loc, w_glob = run(strategy, task, 9)
    expected = [torch.zeros(SIZE, dtype=torch.float64)]
    for n in range(9):
        mean = (varied(0, n) + varied(1, n)) / 2
        unit = torch.cat([part / part.norm() for part in mean.split(list(numels))])
        expected.append(expected[-1] - 0.1 * unit)
    same(w_glob, shown(expected, strategy, 1))
    assert not torch.equal(w_loc[0][-1], w_loc[1][-1])


def test_bytes_of_whole_parameters() -> None:
    """Of 8, 16 and 24 elements one worker owns the last, which backward completes first, one the others."""
    strategy = SSDSGD(warmup=0, delay=2, staggered=False)
    numels = (8, 16, 24)
    task = Given(grads=varied, rates=lambda _: 0.1, make=lambda p: Normalised(p, lr=0.1), numels=numels)
    sent = play(cluster_of(1.0, 1.0), strategy, 8, task=task).each("bytes_sent")
    # pushes carry two marks a share; pulls start in steps 2, 4 and 6
    assert sent == [8 * (8 * (24 + 2)) + 3 * 8 * 24] * 2
    task = Given(grads=varied, rates=lambda _: 0.1, make=lambda p: Normalised(p, lr=0.1), numels=(40, 8))
    sent = play(cluster_of(1.0, 1.0), strategy, 8, task=task).each("bytes_sent")
    assert sent == [8 * 8 * (40 + 1) + 3 * 8 * 8, 8 * 8 * (8 + 1) + 3 * 8 * 40]


# --- seconds and bytes


SHARE, MARK = WEIGHTS // 4, 4


def test_bytes_are_those_of_the_weights_and_a_kth_of_them() -> None:
    k, steps = 5, 26
    sent = play(cluster_of(*[1.0] * 4), SSDSGD(warmup=0, delay=k, staggered=False), steps, task=point()).each(
        "bytes_sent"
    )
    assert sent == [3 * (steps * (SHARE + MARK) + (steps - 1) // k * SHARE)] * 4
    assert sent[0] == pytest.approx((steps + 5) * WEIGHTS * 3 / 4, rel=1e-3)


@pytest.mark.parametrize(
    ("step_s", "hidden"), [(0.11, "all"), (0.06, "pushes"), (0.01, "nothing")], ids=lambda value: str(value)
)
def test_seconds(step_s: float, hidden: str) -> None:
    """A push (0.049 s) has the next step to hide behind; every k steps a pull travels before it."""
    k, steps = 3, 13
    run = play(cluster_of(*[step_s] * 4), SSDSGD(warmup=0, delay=k, staggered=False), steps, task=point())
    push_s, pull_s = 3 * (SHARE + MARK) / BYTES_PER_S, 3 * SHARE / BYTES_PER_S
    flying_s = [push_s + pull_s if t and t % k == 0 else push_s for t in range(steps)]
    assert run.seconds == close(step_s + sum(max(step_s, s) for s in flying_s[:-1]) + flying_s[-1])
    a_step_s = sum(max(step_s, s) for s in flying_s[1 : k + 1]) / k
    if hidden == "all":
        assert a_step_s == close(step_s)
    elif hidden == "nothing":
        assert a_step_s == pytest.approx(ring_s(WEIGHTS, 4) * (1 + 1 / k) / 2, rel=1e-3)


def test_the_warm_up_takes_as_long_as_bsp() -> None:
    bsp, ours = (play(cluster_of(1.0, 2.0), s, 6, task=point()) for s in (BSP(), SSDSGD(warmup=6)))
    assert ours.seconds == bsp.seconds
    assert ours.each("bytes_sent") == bsp.each("bytes_sent")
    assert all(map(torch.equal, ours.weights, bsp.weights))


@pytest.mark.parametrize(
    "strategy", [SSDSGD(warmup=0), SSDSGD(on="server", warmup=1), SSDSGD(rule="authors", warmup=1)], ids=str
)
@given(
    traces=st.lists(st.lists(st.floats(0.001, 2.0), min_size=1, max_size=4), min_size=2, max_size=4),
    k=st.integers(1, 4),
)
@settings(max_examples=25, deadline=None)
def test_nobody_is_more_than_one_step_ahead(strategy: SSDSGD, traces: list[list[float]], k: int) -> None:
    begun = [0] * len(traces)

    def grads(worker: int, step: int) -> Tensor:
        begun[worker] = step + 1
        assert max(begun) - min(begun) <= 1 or step == 0
        return torch.ones(SIZE, dtype=torch.float64)

    task = Given(grads=grads, rates=lambda _: 0.1, make=lambda p: SGD(p, lr=0.1))
    cluster = cluster_of(*(Trace(trace_s=tuple(trace)) for trace in traces))
    play(cluster, replace(strategy, delay=k), 9, task=task)
    assert begun == [9] * len(traces)
