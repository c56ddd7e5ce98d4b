"""SelSync decides as its formulas say, on gradients whose norms the test makes up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from offbeat import SelSync, SettingError
from offbeat.core.ledger import Ledger
from offbeat.core.members import Members, Part
from offbeat.core.pending import block_on
from offbeat.core.replica import Replica
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback, Worker
from offbeat.experiments.tasks.base import Batch
from offbeat.experiments.tasks.quadratic import Quadratic
from offbeat.experiments.virtual_run import simulate
from offbeat.strategies.selsync import BackwardNorm, SelSyncState, smooth
from tests.support.lone_port import OtherMember
from tests.support.virtual_runs import close, cluster_of, play

pytestmark = pytest.mark.virtual

# --- the formulas


def test_the_norm_of_a_sharded_gradient_counts_copies_once() -> None:
    """This rank has half of a matrix, and a copy of a bias that the other member has as well."""
    model = nn.Linear(3, 2)
    model.bias.part = Part(2, 4, 0.5)  # type: ignore[attr-defined]
    replica = Replica(model)
    replica.members = Members(OtherMember(10.0), sharded=True)  # type: ignore[arg-type]
    model.weight.grad, model.bias.grad = torch.full((2, 3), 2.0), torch.tensor([3.0, 1.0])
    assert block_on(BackwardNorm(replica).square()) == pytest.approx(6 * 4.0 + 0.5 * (9.0 + 1.0) + 10.0)


def test_a_mean_in_which_older_values_count_less() -> None:
    assert smooth([8.0], 0.3) == 8.0
    assert smooth([1.0, 2.0, 4.0], 0.5) == pytest.approx((4 + 2 / 2 + 1 / 4) / (1 + 1 / 2 + 1 / 4))
    assert smooth([1.0, 2.0, 4.0], 1.0) == 4.0


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.floats(0.01, 1.0))
def test_smoothing_is_the_weighted_mean_of_the_formula(values: list[float], smoothing: float) -> None:
    weights = [(1 - smoothing) ** k for k in range(len(values))]
    expected = sum(w * v for w, v in zip(weights, reversed(values), strict=True)) / sum(weights)
    assert smooth(values, smoothing) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_changes_by_hand() -> None:
    """A window of 2 and a smoothing of 1/2: E is (2 new + 1 old) / 3."""
    strategy, state = SelSync(window=2, smoothing=0.5), SelSyncState()
    changes = [strategy.change(state, square, world=7) for square in (4.0, 8.0, 2.0, 2.0)]
    smoothed = [4.0, 20 / 3, 4.0, 2.0]
    assert changes[0] == math.inf  # nothing to compare with
    for change, (before, now) in zip(changes[1:], pairwise(smoothed), strict=True):
        assert change == pytest.approx(abs(now - before) / before)
    assert (state.smoothed, state.squares, state.step) == (pytest.approx(2.0), [2.0, 2.0], 4)


@pytest.mark.parametrize(("world", "smoothing"), [(1, 0.01), (16, 0.16), (100, 1.0), (400, 1.0)])
def test_the_papers_smoothing_is_a_hundredth_a_worker(world: int, smoothing: float) -> None:
    strategy, state = SelSync(), SelSyncState()
    for square in (1.0, 3.0):
        strategy.change(state, square, world)
    assert state.smoothed == pytest.approx((3 + (1 - smoothing)) / (2 - smoothing))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_an_overflow_synchronizes_and_leaves_no_trace(bad: float) -> None:
    strategy, state, calm = SelSync(window=3), SelSyncState(), SelSyncState()
    for square in (4.0, 5.0, 6.0):
        strategy.change(state, square, 4)
        strategy.change(calm, square, 4)
    assert strategy.change(state, bad, 4) == math.inf
    assert (state.squares, state.smoothed) == (calm.squares, calm.smoothed)
    assert strategy.change(state, 9.0, 4) == strategy.change(calm, 9.0, 4) < math.inf


def test_after_a_gradient_of_zero_everything_is_a_change() -> None:
    strategy, state = SelSync(window=2, smoothing=1.0), SelSyncState()
    assert [strategy.change(state, square, 4) for square in (0.0, 0.0, 2.0, 2.0)] == [math.inf] * 3 + [0.0]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"delta": -0.1}, "0 or more"),
        ({"delta": math.nan}, "0 or more"),
        ({"delta": "0.3"}, "0 or more"),
        ({"aggregate": "weights"}, "parameters, gradients"),
        ({"window": 1}, "at least 2"),
        ({"window": 2.5}, "whole number"),
        ({"smoothing": 0.0}, "above 0"),
        ({"smoothing": 1.5}, "at most 1"),
        ({"smoothing": "0.1"}, "at most 1"),
        ({"period": 0}, "at least 1"),
        ({"period": -2}, "at least 1"),
        ({"period": 2.0}, "whole number"),
        ({"period": "2"}, "whole number"),
    ],
)
def test_settings_that_make_no_sense(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        SelSync(**wrong)


# --- who synchronizes when


@dataclass(frozen=True, kw_only=True)
class Scripted(Quadratic):
    """Gradients whose squared norms are in a script: a row a worker, a number a step."""

    dimension: int = 100
    script: tuple[tuple[float, ...], ...]
    built: list[nn.Module] = field(default_factory=list, compare=False)
    taken: Counter[int] = field(default_factory=Counter, compare=False)

    def build(self) -> nn.Module:
        self.built.append(super().build())
        return self.built[-1]

    def gradient(self, model: nn.Module, batch: Batch) -> Tensor:
        worker = next(i for i, own in enumerate(self.built) if own is model)
        square = self.script[worker][self.taken[worker]]
        self.taken[worker] += 1
        weight = model.get_parameter("w")
        weight.grad = torch.full_like(weight, math.sqrt(square / self.dimension))
        return torch.zeros(())


class Clipped(Scripted):
    """The same in a loop that clips: every gradient has the norm 0.1 when the optimizer steps."""

    max_norm = 0.1


class Diary(Callback):
    """The steps in which worker 0 synchronized."""

    def __init__(self, ledgers: list[Ledger]) -> None:
        self.ledger = ledgers[0]
        self.synchronized: list[int] = []
        self._before = 0

    def stepped(self, step: int, loss: Tensor, worker: Worker) -> None:
        if self.ledger.sync_steps > self._before:
            self.synchronized.append(step)
        self._before = self.ledger.sync_steps


def synchronized(
    strategy: SelSync, *script: list[float], make: Callable[..., Scripted] = Scripted
) -> list[int]:
    """The steps in which these workers synchronize; the same for all, or nothing would come of it."""
    diaries: list[Diary] = []

    def watchers(ledgers: list[Ledger]) -> list[Callback]:
        diaries.append(Diary(ledgers))
        return [diaries[0]]

    task = make(script=tuple(map(tuple, script)))
    steps = len(script[0])
    job = Job(task=task, strategy=strategy, workers=len(script), steps=steps, evaluate_every=steps)
    simulate(job, cluster_of(*[0.1] * len(script)), task.load(), watchers)
    return diaries[0].synchronized


STEADY = [1.0] * 12
SPIKED = [1.0] * 7 + [9.0] + [1.0] * 4  # in step 8
both = pytest.mark.parametrize("aggregate", ["parameters", "gradients"])


@both
def test_the_window_always_synchronizes_and_infinity_never_after_it(aggregate: str) -> None:
    strategy = SelSync(delta=math.inf, window=5, aggregate=aggregate)
    assert synchronized(strategy, SPIKED, STEADY) == [1, 2, 3, 4, 5]
    assert synchronized(replace(strategy, late=True), SPIKED, STEADY) == [1, 2, 3, 4, 5]


@both
@pytest.mark.parametrize("late", [False, True])
def test_zero_always_synchronizes(aggregate: str, late: bool) -> None:
    strategy = SelSync(delta=0.0, window=2, aggregate=aggregate, late=late)
    assert synchronized(strategy, STEADY, STEADY) == list(range(1, 13))


@both
def test_one_workers_change_makes_all_synchronize(aggregate: str) -> None:
    """Smoothing 1 compares with the step before; 8 is the spike, 9 the return."""
    strategy = SelSync(delta=0.5, window=3, smoothing=1.0, aggregate=aggregate)
    assert synchronized(strategy, STEADY, STEADY, STEADY) == [1, 2, 3]
    for who in range(3):
        script = [SPIKED if worker == who else STEADY for worker in range(3)]
        assert synchronized(strategy, *script) == [1, 2, 3, 8, 9]


@both
def test_clipping_hides_no_change(aggregate: str) -> None:
    """Measured after clipping, all gradients would be alike: nobody would synchronize after the window."""
    strategy = SelSync(delta=0.5, window=3, smoothing=1.0, aggregate=aggregate)
    assert synchronized(strategy, SPIKED, STEADY, make=Clipped) == [1, 2, 3, 8, 9]


def test_the_mean_decides_not_the_gradient() -> None:
    """Half as much again is a change by 0.5, but of the mean over four steps only by 0.15."""
    script = [1.0] * 7 + [1.5] + [1.0] * 4
    for smoothing, expected in ((1.0, [1, 2, 3, 4, 8, 9]), (0.1, [1, 2, 3, 4])):
        strategy = SelSync(delta=0.3, window=4, smoothing=smoothing)
        assert synchronized(strategy, script, STEADY) == expected
    assert synchronized(SelSync(delta=0.14, window=4, smoothing=0.1), script, STEADY) == [1, 2, 3, 4, 8]


def test_what_left_the_window_is_forgotten() -> None:
    """The spike of step 2 leaves a window of 4 in step 6: the mean drops from about 3 to 1."""
    script = [1.0, 9.0] + [1.0] * 10
    strategy = SelSync(delta=0.5, window=4, smoothing=0.01)
    assert synchronized(strategy, script, STEADY) == [1, 2, 3, 4, 6]


squares = st.lists(st.floats(0.1, 10.0), min_size=14, max_size=14)


@both
@settings(max_examples=8, deadline=None)
@given(one=squares, other=squares, delta=st.sampled_from([0.1, 0.3, 1.0]))
def test_late_is_one_step_late(aggregate: str, one: list[float], other: list[float], delta: float) -> None:
    strategy = SelSync(delta=delta, window=3, smoothing=0.8, aggregate=aggregate)
    now = synchronized(strategy, one, other)
    late = synchronized(replace(strategy, late=True), one, other)
    assert late == [1, 2, 3, *(step + 1 for step in now if 3 < step < 14)]


# --- asking each other only every few steps


@both
@pytest.mark.parametrize(
    ("period", "answered"),
    [
        (2, [9]),  # asks in 5, 7, 9, 11: both at once, and only once
        (3, [9]),  # in 6, 9, 12
        (4, [11]),  # in 7, 11, when all is calm again
        (5, [8]),  # in 8; the return, in 9, waits for 13
        (10, []),
    ],
)
def test_a_change_is_answered_when_the_workers_ask_next(
    aggregate: str, period: int, answered: list[int]
) -> None:
    """A spike in step 8, the return in 9, at any worker."""
    strategy = SelSync(delta=0.5, window=3, smoothing=1.0, aggregate=aggregate, period=period)
    assert synchronized(strategy, SPIKED, STEADY) == [1, 2, 3, *answered]
    assert synchronized(strategy, STEADY, SPIKED) == [1, 2, 3, *answered]


def test_the_window_answers_for_its_own_changes() -> None:
    script = [1.0, 9.0, 1.0] + [1.0] * 9
    assert synchronized(SelSync(delta=0.5, window=3, smoothing=1.0, period=2), script, STEADY) == [1, 2, 3]


@both
@pytest.mark.parametrize("late", [False, True])
@settings(max_examples=4, deadline=None)
@given(one=squares, other=squares, delta=st.sampled_from([0.3, 1.0, 3.0]), period=st.integers(2, 5))
def test_no_change_is_lost(
    aggregate: str, late: bool, one: list[float], other: list[float], delta: float, period: int
) -> None:
    """What is answered at once with period 1 is answered in the next of the steps 3 + n, 3 + 2n, …"""
    strategy = SelSync(delta=delta, window=3, smoothing=0.8, aggregate=aggregate)
    changed = [step for step in synchronized(strategy, one, other) if step > 3]
    asked = sorted({step + (3 - step) % period for step in changed})
    expected = [step + late for step in asked if step + late <= 14]
    assert synchronized(replace(strategy, period=period, late=late), one, other) == [1, 2, 3, *expected]


@both
@pytest.mark.parametrize("late", [False, True])
def test_zero_and_infinity_every_few_steps(aggregate: str, late: bool) -> None:
    strategy = SelSync(delta=0.0, window=2, aggregate=aggregate, late=late, period=4)
    assert synchronized(strategy, SPIKED, STEADY) == [1, 2, 6, 10]
    assert synchronized(replace(strategy, delta=math.inf), SPIKED, STEADY) == [1, 2]


# --- what it costs in virtual time; 0.1 s a step, 1 MB/s, an operation takes 10 ms


def _seconds(strategy: SelSync, steps: int, update_share: float = 0.0) -> float:
    cluster = cluster_of(0.1, 0.1, operation_s=0.01, update_share=update_share)
    return play(cluster, strategy, steps).seconds


def test_a_flag_each_step_and_late_ones_for_nothing() -> None:
    """1,000 floats take 4,032 bytes, so many µs on the wire; a flag's 4 bytes take 4 µs."""
    full, flag = 0.01 + 4032e-6, 0.01 + 4e-6
    never = SelSync(delta=1e9, window=2)
    assert _seconds(never, 6) == close(6 * 0.1 + 2 * full + 4 * flag)
    assert _seconds(replace(never, delta=math.inf), 6) == close(6 * 0.1 + 2 * full)
    # the last flag is awaited when the run drains
    assert _seconds(replace(never, late=True), 6) == close(6 * 0.1 + 2 * full + flag)


def test_nothing_travels_between_steps_that_ask() -> None:
    full, flag = 0.01 + 4032e-6, 0.01 + 4e-6
    for period, asked in ((2, 2), (3, 1), (4, 1), (5, 0)):
        strategy = SelSync(delta=1e9, window=2, period=period)
        assert _seconds(strategy, 6) == close(6 * 0.1 + 2 * full + asked * flag)


def test_the_flag_travels_while_the_optimizer_steps() -> None:
    full = 0.01 + 4032e-6
    assert _seconds(SelSync(delta=1e9, window=2), 6, update_share=0.2) == close(6 * 0.1 + 2 * full)


def test_stragglers_are_waited_for_at_each_flag() -> None:
    quick = play(cluster_of(0.1, 0.1), SelSync(delta=1e9, window=2), 6).seconds
    slow = play(cluster_of(0.1, 0.3), SelSync(delta=1e9, window=2), 6).seconds
    assert slow == close(quick + 6 * 0.2)


def test_shares_of_local_steps() -> None:
    run = play(cluster_of(0.1, 0.1), SelSync(delta=1e9, window=2), 8)
    assert run.each("sync_steps") == [2, 2]
    assert run.each("local_steps") == [6, 6]
    assert run.each("lssr") == [0.75, 0.75]


# --- what is told


@pytest.mark.parametrize(
    ("delta", "period", "spike", "told"),
    [
        (0.3, 1, 2.0, True),  # the gradient never changes by as much
        (0.3, 100, 2.0, True),
        (0.01, 1, 2.0, False),
        (0.01, 100, 2.0, False),  # seldom, but always where the workers decide
        (math.inf, 1, 2.0, False),  # as asked for
        (0.0, 1, 1.0, False),
    ],
)
def test_that_replicas_train_alone_is_told_once(
    caplog: pytest.LogCaptureFixture, delta: float, period: int, spike: float, told: bool
) -> None:
    """Every fifth gradient has another norm: with 2 workers E changes by 0.03 or so then."""
    script = [spike if step % 5 == 0 else 1.0 for step in range(1100)]
    ledgers: list[Ledger] = []
    job = Job(
        task=Scripted(script=(tuple(script),) * 2),
        strategy=SelSync(delta=delta, period=period),
        workers=2,
        steps=1100,
        evaluate_every=1100,
    )

    def keep(made: list[Ledger]) -> list[Callback]:
        ledgers.extend(made)
        return []

    simulate(job, cluster_of(1.0, 1.0), job.task.load(None), keep)
    found = [text for ledger in ledgers for _, _, kind, text in ledger.events if kind == "alone"]
    assert len(found) == told
    said = [record.getMessage() for record in caplog.records if "train alone" in record.getMessage()]
    assert len(said) == told
    if told:
        assert "only 0 of the last 500 steps" in said[0] and "delta is 0.3" in said[0]
