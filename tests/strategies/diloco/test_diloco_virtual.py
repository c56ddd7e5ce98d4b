"""DiLoCo in virtual time: its rule by hand, closed forms of its weights, its seconds and its bytes."""

from __future__ import annotations

import cmath
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offbeat import DiLoCo, ErrorFeedback, LocalSGD, TopK
from offbeat.strategies import diloco as diloco_module
from offbeat.strategies.diloco import outer_state
from offbeat.worlds.virtual.step_times import Trace
from tests.support.diloco_bowls import CURVATURE, LR, SIZE, Bowls, target
from tests.support.virtual_runs import BYTES_PER_S, WEIGHTS, close, cluster_of, keep_spans, play

pytestmark = pytest.mark.virtual


# --- the rule


def by_hand(s: DiLoCo, world: int, steps: int) -> tuple[list[list[Tensor]], list[Tensor]]:
    """All workers' weights before each step and after the last; the published ones after each."""
    every, lines = s.period // s.fragments, SIZE // 8
    edges = [8 * (lines * p // s.fragments) for p in range(s.fragments + 1)]
    w = [torch.zeros(SIZE, dtype=torch.float64) for _ in range(world)]
    w_global, v = torch.zeros(SIZE, dtype=torch.float64), torch.zeros(SIZE, dtype=torch.float64)
    history = [[mine.clone()] for mine in w]
    average, published = w_global.clone(), []
    merged: list[list[Tensor]] = [[] for _ in range(s.fragments)]
    for t in range(1, steps + 1):
        for i, mine in enumerate(w):
            mine -= LR * CURVATURE * (mine - target(i))
        if t % every == 0:
            p = (t // every - 1) % s.fragments
            here = slice(edges[p], edges[p + 1])
            pairs = zip(history, w, strict=True)
            sent = [seen[t - s.delay][here] if s.delay else mine[here] for seen, mine in pairs]
            outer_gradient = torch.stack([w_global[here] - one for one in sent]).mean(0)
            v[here] = s.outer_momentum * v[here] + outer_gradient
            w_global[here] -= s.outer_lr * (outer_gradient + s.outer_momentum * v[here])
            for mine in w:
                mine[here] = (1 - s.mix) * w_global[here] + s.mix * mine[here]
            merged[p].append(w_global[here].clone())
            counts = [s.average**age for age in reversed(range(len(merged[p])))]
            average[here] = sum(c * w for c, w in zip(counts, merged[p], strict=True)) / sum(counts)
        for seen, mine in zip(history, w, strict=True):
            seen.append(mine.clone())
        published.append(average.clone())
    return history, published


@st.composite
def diloco(draw: st.DrawFn) -> DiLoCo:
    fragments, stride = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    return DiLoCo(
        period=fragments * stride,
        fragments=fragments,  # of five lines: a sixth has nothing
        delay=draw(st.integers(0, stride - 1)),
        outer_lr=draw(st.floats(0.1, 1.2)),
        outer_momentum=draw(st.sampled_from([0.0, 0.5, 0.9])),
        mix=draw(st.sampled_from([0.0, 0.3, 0.5])),
        average=draw(st.sampled_from([0.0, 0.3, 0.8])),
        codec=draw(st.sampled_from([None, TopK(1.0), ErrorFeedback(TopK(1.0))])),  # which lose nothing
    )


@given(strategy=diloco(), world=st.integers(1, 3), steps=st.integers(1, 30))
@settings(deadline=None, max_examples=40)
def test_it_does_what_its_rule_says(strategy: DiLoCo, world: int, steps: int) -> None:
    task = Bowls()
    play(cluster_of(*[1.0] * world), strategy, steps, task=task, evaluate_every=1)
    task.expect(*by_hand(strategy, world, steps))


@pytest.mark.parametrize("period", [1, 4])
@pytest.mark.parametrize(("eta", "mu"), [(0.7, 0.9), (1.0, 0.5), (0.5, 0.0)])
def test_nesterov_in_closed_form(period: int, eta: float, mu: float) -> None:
    """H steps shrink the way to the middle c̄ by ρ = (1 − lr·a)^H. With q = 1 − η(1 − ρ), Nesterov's
    iterates follow x_{k+1} = q((1+μ) x_k − μ x_{k−1}), and w_global − c̄ = x_{k+1}/q looks ahead of them."""
    world, rounds = 2, 6
    task = Bowls()
    strategy = DiLoCo(period=period, outer_lr=eta, outer_momentum=mu)
    play(cluster_of(*[1.0] * world), strategy, rounds * period, task=task, evaluate_every=period)
    middle = (target(0) + target(1)) / 2
    for k, w_global in enumerate(task.published, start=1):
        for j, a in enumerate(CURVATURE.tolist()):
            q = 1 - eta * (1 - (1 - LR * a) ** period)
            root = cmath.sqrt((q * (1 + mu)) ** 2 - 4 * q * mu)
            r1, r2 = (q * (1 + mu) + root) / 2, (q * (1 + mu) - root) / 2
            x_0 = -middle[j].item()  # training starts at 0
            first = (x_0 * q - x_0 * r2) / (
                r1 - r2
            )  # x_k = first·r1^k + (x_0 − first)·r2^k, with x_1 = q x_0
            off = (first * r1 ** (k + 1) + (x_0 - first) * r2 ** (k + 1)) / q
            assert w_global[j].item() - middle[j].item() == pytest.approx(off.real, rel=1e-9, abs=1e-12)


@given(strategy=diloco(), world=st.integers(1, 3))
@settings(deadline=None, max_examples=20)
def test_to_publish_an_average_changes_no_training(strategy: DiLoCo, world: int) -> None:
    """Where all fragments have been merged equally often, it is the moving mean of what else is published."""
    looks = []
    for average in (0.0, 0.75):
        task, period = Bowls(), strategy.period
        cluster, averaged = cluster_of(*[1.0] * world), replace(strategy, average=average)
        play(cluster, averaged, 5 * period, task=task, evaluate_every=period)
        looks.append((task.published, task.w_local))
    (plain, trained), (published, trained_too) = looks
    assert all(map(torch.equal, map(torch.stack, trained), map(torch.stack, trained_too)))
    total, count = torch.zeros(SIZE, dtype=torch.float64), 0.0
    for w_global, shown in zip(plain, published, strict=True):
        total, count = 0.75 * total + w_global, 0.75 * count + 1
        torch.testing.assert_close(shown, total / count, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("codec", [None, TopK(0.5)])
def test_offload_changes_nothing(
    codec: TopK | None, momentum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the way over the host's memory is taken only if it is asked for, as here."""
    runs = []
    for offload in ("none", "cpu"):
        strategy = DiLoCo(
            period=4, fragments=2, delay=1, average=0.5, outer_momentum=momentum, codec=codec, offload=offload
        )
        for module in (diloco_module, outer_state) if offload == "cpu" else ():
            monkeypatch.setattr(module, "is_offloaded", lambda outer, weights: True)
        task = Bowls()
        weights = play(cluster_of(1.0, 1.0), strategy, 12, task=task, evaluate_every=5).weights
        runs.append([*weights, *task.published])
    assert all(map(torch.equal, *runs))


# --- where it is another strategy


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("period", [1, 4])
def test_with_an_outer_optimizer_that_does_nothing_it_is_local_sgd_bit_for_bit(
    world: int, period: int
) -> None:
    cluster = cluster_of(*(0.1 + 0.01 * rank for rank in range(world)), latency_s=1e-5)
    runs = [
        play(cluster, strategy, 10)
        for strategy in (
            LocalSGD(period=period),
            DiLoCo(period=period, outer_lr=1.0, outer_momentum=0.0),
        )
    ]
    assert all(map(torch.equal, runs[0].weights, runs[1].weights))
    for what in ("bytes_sent", "sync_steps", "wait_s", "compute_s"):
        assert runs[0].each(what) == runs[1].each(what)


# --- seconds and bytes


def sizes_of(fragments: int) -> list[int]:
    lines = WEIGHTS // 64
    return [64 * (lines * (p + 1) // fragments - lines * p // fragments) for p in range(fragments)]


def phase_s(nbytes: int, world: int) -> float:
    """Seconds of the way to the owners, or back: each sends all but its part, or its part to all."""
    lines = nbytes // 64
    owned = [64 * (lines * (r + 1) // world - lines * r // world) for r in range(world)]
    return max(max(nbytes - own, (world - 1) * own) for own in owned) / BYTES_PER_S


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("fragments", [1, 2, 5, 10])
def test_fragments_send_the_model_once_in_a_period(world: int, fragments: int) -> None:
    run = play(cluster_of(*[0.05] * world), DiLoCo(period=10, fragments=fragments), 30)
    assert sum(sizes_of(fragments)) == WEIGHTS
    assert sum(run.each("bytes_sent")) == 3 * 2 * (world - 1) * WEIGHTS
    assert run.each("sync_steps") == [3 * fragments] * world
    assert run.seconds == close(30 * 0.05 + 3 * sum(2 * phase_s(n, world) for n in sizes_of(fragments)))


def test_with_a_codec_packets_travel_and_what_they_lack_comes_later() -> None:
    """A tenth of a fragment's elements, from each of three workers: without feedback some never come."""
    changed = []
    for codec in (TopK(0.1), ErrorFeedback(TopK(0.1))):
        task = Bowls()
        strategy = DiLoCo(period=4, fragments=2, delay=1, outer_lr=1.0, outer_momentum=0.0, codec=codec)
        run = play(cluster_of(1.0, 1.0, 1.0), strategy, 400, task=task)
        packet = codec.nbytes(16, torch.float64) + codec.nbytes(24, torch.float64)
        assert run.each("bytes_sent") == [100 * 2 * packet] * 3
        changed.append(int((task.published[-1] != 0).sum()))
    assert changed[0] < changed[1] == SIZE


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("delay", [0, 1, 2, 3])
@pytest.mark.parametrize("step_s", [0.0004, 0.001, 0.1])
def test_what_fits_behind_the_delay_costs_no_waiting(fragments: int, delay: int, step_s: float) -> None:
    world, period = 3, 12
    books: list[Any] = []

    def prepare(ledgers: Any) -> None:
        keep_spans(ledgers)
        books.extend(ledgers)

    strategy = DiLoCo(period=period, fragments=fragments, delay=delay, mix=0.5)
    run = play(cluster_of(*[step_s] * world), strategy, 2 * period, prepare=prepare)
    takes = [phase_s(nbytes, world) for nbytes in sizes_of(fragments)]
    hides_s = ((delay - delay // 2) * step_s, delay // 2 * step_s)  # the way to the owners, and back
    waits = 2 * sum(max(0.0, took_s - hidden_s) for took_s in takes for hidden_s in hides_s)
    assert run.each("wait_s") == [close(waits)] * world
    assert run.seconds == close(2 * period * step_s + waits)
    assert run.each("communicate_s") == [close(2 * 2 * sum(takes))] * world
    assert step_s < 0.1 or delay < 2 or waits == 0
    assert len([span for span in books[0].spans if span.kind == "back"]) == 2 * 2 * fragments
    assert not [span for span in books[0].spans if span.kind == "front"]


@given(
    traces=st.lists(st.lists(st.integers(1, 9), min_size=12, max_size=12), min_size=2, max_size=3),
    fragments=st.sampled_from([1, 2, 3]),
    data=st.data(),
)
@settings(deadline=None, max_examples=30)
def test_a_worker_waits_only_for_those_more_than_the_delay_behind(
    traces: list[list[int]], fragments: int, data: st.DataObject
) -> None:
    """Owners have a fragment when the last worker has come to step t−τ, and what it takes is over; all have
    it when the last owner has come to step t−⌊τ/2⌋, and what it takes is over again."""
    stride = 12 // fragments
    delay = data.draw(st.integers(0, stride - 1))
    strategy = DiLoCo(period=12, fragments=fragments, delay=delay)
    seconds = [tuple(0.001 * s for s in trace) for trace in traces]
    run = play(cluster_of(*(Trace(trace_s=s) for s in seconds)), strategy, 12)
    waits = [0.0] * len(seconds)
    for p, nbytes in enumerate(sizes_of(fragments)):
        t = (p + 1) * stride
        came = [list(accumulate(s)) for s in seconds]
        for sent, used in ((t - delay, t - delay // 2), (t - delay // 2, t)):
            there = max(c[sent - 1] + w for c, w in zip(came, waits, strict=True))
            there += phase_s(nbytes, len(seconds))
            waits = [max(w, there - c[used - 1]) for c, w in zip(came, waits, strict=True)]
    assert run.each("wait_s") == [close(wait_s) for wait_s in waits]
