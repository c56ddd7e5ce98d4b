"""A virtual run repeats bit for bit, and trains the very weights that real processes train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from offbeat import (
    ASP,
    BSP,
    GSSP,
    OSP,
    SSDSGD,
    SSP,
    DiLoCo,
    ErrorFeedback,
    GDTopK,
    Half,
    LocalSGD,
    PowerSGD,
    Quantize,
    RandomK,
    SelSync,
    TopK,
)
from offbeat.experiments.job import Job
from offbeat.experiments.tasks.quadratic import Quadratic
from tests.conformance.table import TABLE, AnyStrategy, Repeats, every_strategy
from tests.support.both_worlds import EVERY, STEPS, Outcome, cluster_of, job_of, really, virtually
from tests.support.crew import Crew
from tests.support.virtual_runs import Kept, play

pytestmark = pytest.mark.processes


# --- and what holds of them


EXACT = [case.strategy for case in TABLE if case.repeats is Repeats.EXACTLY]
EXACT += [SelSync(delta=0.3, window=3, period=n) for n in (1, 2)]  # in the table no gradient changes enough
LOCK_STEP = [c.strategy for c in TABLE if c.repeats is Repeats.TO_ROUNDING]
LOCK_STEP += [SSP(staleness=0)] if LOCK_STEP else []  # on demand, as in the table


@pytest.mark.parametrize("strategy", EXACT, ids=str)
@pytest.mark.parametrize("workers", [2, 4])
def test_virtual_weights_are_the_real_ones(
    crew: Callable[[int], Crew], strategy: AnyStrategy, workers: int
) -> None:
    job = job_of(strategy, workers)
    virtual, real = virtually(job), really(crew(workers), job)
    assert virtual.same_weights(real)
    steps = [(point.step, point.loss) for point in virtual.history]
    assert steps == [(point.step, point.loss) for point in real.history]
    assert [step for step, _ in steps] == [5, 10, 12]
    # Until the end, an evaluation reads what has arrived at a server, and that differs from run to run.
    last = -1 if strategy.server_half() else 0
    values = [[point.value for point in history[last:]] for history in (virtual.history, real.history)]
    assert values[0] == values[1]
    counted = ["bytes_sent"] if strategy.server_half() is None else []  # else the server is on the same host
    for ours, theirs in zip(virtual.entries, real.entries, strict=True):
        for what in ("rank", "steps", "samples", "sync_steps", "local_steps", *counted):
            assert getattr(ours, what) == getattr(theirs, what), what


@pytest.mark.parametrize("strategy", LOCK_STEP, ids=str)
@pytest.mark.parametrize("workers", [2, 4])
def test_virtual_weights_are_about_the_real_ones(
    crew: Callable[[int], Crew], strategy: AnyStrategy, workers: int
) -> None:
    """A server adds updates in the order in which they come, so equal to rounding is all there is."""
    job = replace(job_of(strategy, workers), task=Quadratic(dimension=1000))
    task = Kept(dimension=1000)
    virtual = play(cluster_of(workers), strategy, STEPS, task=task, evaluate_every=EVERY)
    real = really(crew(workers), job)
    for ours, theirs in zip(virtual.weights, real.weights, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert [point.step for point in virtual.history] == [point.step for point in real.history] == [5, 10, 12]
    for ledger, theirs in zip(virtual.ledgers, real.entries, strict=True):
        for what in ("rank", "steps", "samples", "sync_steps", "local_steps", "staleness"):
            assert getattr(ledger.totals(), what) == getattr(theirs, what), what


def test_a_gradient_in_closed_form_trains_alike(crew: Callable[[int], Crew]) -> None:
    """Over processes autograd makes the quadratic's gradients, so equal to rounding is all there is."""
    job = replace(job_of(BSP(), 2), task=Quadratic(dimension=1000))
    virtual = play(cluster_of(2), BSP(), STEPS, task=Kept(dimension=1000), evaluate_every=EVERY)
    for ours, theirs in zip(virtual.weights, really(crew(2), job).weights, strict=True):
        torch.testing.assert_close(ours, theirs)


@contextmanager
def fresh_memory_full_of_nan() -> Iterator[None]:
    """Instead of what was there before, which is mostly zeros, so that who reads it mostly gets away."""
    torch.use_deterministic_algorithms(True)  # torch then fills what it hands out
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def twice(job: Job) -> tuple[Outcome, Outcome]:
    one = virtually(job, latency_s=1e-4)
    with fresh_memory_full_of_nan():
        return one, virtually(job, latency_s=1e-4)


@pytest.mark.parametrize(
    "strategy",
    [
        SSP(push="gradient"),
        SSP(push="gradient", codec=ErrorFeedback(TopK(0.1))),
        ASP(codec=RandomK(0.1)),
        GSSP(groups="0,1/2,3", sparse=GDTopK(epoch_steps=5)),
        OSP(budget=0.5, on="server"),
        OSP(budget=0.5, codec=ErrorFeedback(Quantize(4))),
        SSDSGD(delay=3, warmup=2, on="server"),
        BSP(codec=ErrorFeedback(PowerSGD(2))),
        LocalSGD(period=2, codec=Quantize(1)),
        DiLoCo(period=4, fragments=2, delay=1, codec=Half()),
    ],
    ids=str,
)
def test_nothing_is_read_that_nobody_wrote(strategy: AnyStrategy) -> None:
    """Of ways to run that are not in the table; those are below."""
    one, again = twice(job_of(strategy, 4))
    assert one.same_weights(again)
    assert one.entries == again.entries


@every_strategy
def test_a_virtual_run_repeats_bit_for_bit(strategy: AnyStrategy) -> None:
    one, again = twice(job_of(strategy, 4))
    assert one.same_weights(again)
    assert one.history == again.history
    assert one.entries == again.entries
    assert len({entry.compute_s for entry in one.entries}) == 4, "no two workers were equally fast"
    other = virtually(job_of(strategy, 4, seed=1), latency_s=1e-4)
    assert not one.same_weights(other)
    assert one.history[-1].seconds != other.history[-1].seconds
