"""SSD-SGD with staggered pulls: each part by the rule, in its own steps; even bytes, less time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from offbeat import BSP, SSDSGD
from tests.support.ssd_sgd_runs import (
    SIZE,
    Given,
    Normalised,
    given_task,
    halving,
    point,
    reference,
    run,
    same,
    shown,
    varied,
)
from tests.support.virtual_runs import BYTES_PER_S, Kept, close, cluster_of, play, ring_s

pytestmark = pytest.mark.virtual

# --- the rule


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("warmup", "momentum", "decay", "scaling", "every"),
    [(0, 0.0, 0.0, None, 1), (3, 0.9, 0.1, None, 16), (0, 0.9, 0.1, 0.7, 16)],
)
def test_every_weight_of_every_step(
    k: int, world: int, warmup: int, momentum: float, decay: float, scaling: float | None, every: int
) -> None:
    """Learning rates differ from step to step. Of six lines in all, some parts have none."""
    task = given_task(momentum, decay)
    strategy = SSDSGD(rule="authors", warmup=warmup, delay=k, scaling=scaling, staggered=True)
    expected_loc, expected_glob = reference(strategy, task, 16, momentum, decay, world)
    w_loc, w_glob = run(strategy, task, 16, every, world)
    same(w_glob, shown(expected_glob, strategy, every))
    for ours, expected in zip(w_loc, expected_loc, strict=True):
        same(ours, expected)


@pytest.mark.parametrize("staggered", [True, False])
@pytest.mark.parametrize(("k", "world"), [(2, 3), (3, 2), (5, 2)])
def test_groups_with_learning_rates_of_their_own(k: int, world: int, staggered: bool) -> None:
    """Parts cut through parameters of three groups, with gaps behind two of them."""
    task = Given(
        grads=varied,
        rates=halving,
        make=lambda params: SGD([{"params": [p]} for p in params], lr=1.0, momentum=0.9, weight_decay=0.1),
        numels=(11, 24, 13),
        factors=(1.0, 0.25, 3.0),
    )
    strategy = SSDSGD(rule="authors", warmup=2, delay=k, alpha=1.5, beta=0.5, staggered=staggered)
    expected_loc, expected_glob = reference(strategy, task, 16, 0.9, 0.1, world)
    w_loc, w_glob = run(strategy, task, 16, 16, world)
    same(w_glob, expected_glob[::16])
    for ours, expected in zip(w_loc, expected_loc, strict=True):
        same(ours, expected)


@pytest.mark.parametrize(
    ("numels", "shares", "phases"), [((8, 16, 24), (3, 3), (2, 1, 1)), ((40, 8), (1, 5), (1, 1))]
)
def test_shares_of_whole_parameters_are_cut_between_them(
    numels: tuple[int, ...], shares: tuple[int, ...], phases: tuple[int, ...]
) -> None:
    """The parameter that is last comes first, and is the first worker's; `shares` are in lines of 8.

    `phases` say in which part each parameter lies: it begins where a third of the share is nearest.
    """
    steps = 12
    task = Given(grads=varied, rates=halving, make=lambda p: Normalised(p, lr=0.1), numels=numels)
    strategy = SSDSGD(rule="authors", warmup=0, delay=3, alpha=1.0, staggered=True)

    def unit(n: int) -> Tensor:
        mean = (varied(0, n) + varied(1, n)) / 2
        return torch.cat([part / part.norm() for part in mean.split(list(numels))])

    history = [torch.zeros(SIZE, dtype=torch.float64)]
    for n in range(steps):
        history.append(history[-1] - halving(n) * unit(n))
    expected_loc, _ = reference(strategy, task, steps, 0.0, 0.0, w_glob=history, shares=shares, phases=phases)
    w_loc, w_glob = run(strategy, task, steps)
    same(w_glob, shown(history, strategy, 1))
    for ours, expected in zip(w_loc, expected_loc, strict=True):
        same(ours, expected)


# --- what it equals


def test_with_a_delay_of_one_there_is_nothing_to_stagger() -> None:
    at_once, staggered = (
        run(SSDSGD(warmup=1, delay=1, staggered=staggered), given_task(0.9, 0.1), 9, world=3)
        for staggered in (False, True)
    )
    assert torch.equal(torch.stack(at_once[1]), torch.stack(staggered[1]))
    for one, other in zip(at_once[0], staggered[0], strict=True):
        assert torch.equal(torch.stack(one), torch.stack(other))


def test_the_global_weights_follow_the_gradients_alone() -> None:
    """Which are given here: however workers pull, their owners step alike, to the bit."""
    strategy = SSDSGD(warmup=1, delay=3)
    one, other = (
        run(replace(strategy, staggered=staggered), given_task(0.9, 0.1), 12)[1]
        for staggered in (False, True)
    )
    assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("k", [1, 3, 5])
def test_one_worker_is_the_plain_loop(k: int) -> None:
    strategy = SSDSGD(rule="authors", warmup=1, delay=k, alpha=1.0, beta=0.0, staggered=True)
    ours, plain = (play(cluster_of(1.0), each, 14, task=point()) for each in (strategy, BSP()))
    assert torch.equal(ours.weights[0], plain.weights[0])


# --- bytes and seconds

WEIGHTS = 4 << 10
SHARE, MARK = WEIGHTS // 4, 4  # of four workers; 16 lines


def small() -> Kept:
    return Kept(dimension=1 << 10)


def _sent(k: int) -> list[list[float]]:
    """By each worker, in 1, 2, 3, … steps."""
    strategy = SSDSGD(warmup=0, delay=k)
    return [
        play(cluster_of(*[1.0] * 4), strategy, steps, task=small()).each("bytes_sent")
        for steps in range(1, k + 4)
    ]


def test_every_step_but_the_first_sends_the_same() -> None:
    k = 4
    sent = _sent(k)
    assert sent[0] == [3 * (SHARE + MARK)] * 4, "there is nothing to pull yet"
    steps = [[b - a for a, b in zip(before, after, strict=True)] for before, after in pairwise(sent)]
    assert steps == [[3 * (SHARE + MARK + SHARE // k)] * 4] * len(steps)
    assert steps[0][0] == pytest.approx(WEIGHTS * (1 + 1 / k) * 3 / 4, rel=0.01)


def test_where_a_share_does_not_divide_a_step_sends_a_line_more_and_a_period_the_same() -> None:
    k = 5
    sent = [each[0] for each in _sent(k)]
    steps = [after - before for before, after in pairwise(sent)]
    assert {step - 3 * (SHARE + MARK) for step in steps} == {3 * 64 * 3, 3 * 64 * 4}
    periods = [after - before for before, after in zip(sent[:-k], sent[k:], strict=True)]
    assert periods == [3 * (k * (SHARE + MARK) + SHARE)] * len(periods)


def test_bytes_of_whole_parameters() -> None:
    """Part 1 has both parameters, and is pulled in the steps 1, 3, 5 and 7."""
    task = Given(grads=varied, rates=halving, make=lambda p: Normalised(p, lr=0.1), numels=(40, 8))
    sent = play(cluster_of(1.0, 1.0), SSDSGD(warmup=0, delay=2), 8, task=task).each("bytes_sent")
    assert sent == [8 * 8 * (40 + 1) + 4 * 64 * 1, 8 * 8 * (8 + 1) + 4 * 64 * 5]


@pytest.mark.parametrize("ratio", [0.5, 1.5, 4.0])
def test_seconds_a_step(ratio: float) -> None:
    """At once, one step of k takes max(C, K), others max(C, K/2); staggered, all max(C, K(1+1/k)/2)."""
    k, ring = 4, ring_s(WEIGHTS, 4)
    compute_s, push_s, pull_s = ring / ratio, 3 * (SHARE + MARK) / BYTES_PER_S, 3 * SHARE / BYTES_PER_S

    def a_step_s(staggered: bool) -> float:
        """The mean over a period, from runs that end alike."""
        strategy, cluster = SSDSGD(warmup=0, delay=k, staggered=staggered), cluster_of(*[compute_s] * 4)
        short, long = (play(cluster, strategy, n * k + 1, task=small()).seconds for n in (2, 3))
        return (long - short) / k

    staggered_s = a_step_s(True)
    assert staggered_s == close(max(compute_s, push_s + pull_s / k))
    assert staggered_s == pytest.approx(max(compute_s, ring * (1 + 1 / k) / 2), rel=0.01)
    others_s = (k - 1) * max(compute_s, push_s)
    assert a_step_s(False) == close((others_s + max(compute_s, push_s + pull_s)) / k)
