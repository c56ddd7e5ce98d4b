"""The guard of DiLoCo: an outlier does not change what others train, and is counted; else nothing changes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from offbeat import DiLoCo, SettingError, TopK
from offbeat.experiments.callbacks.events import EventList
from offbeat.experiments.tasks.base import Batch
from offbeat.strategies.diloco.guard import ROWS, find_outliers, measure
from tests.support.diloco_bowls import CURVATURE, LR, SIZE, Bowls, target
from tests.support.loops import flat
from tests.support.virtual_runs import cluster_of, play

pytestmark = pytest.mark.virtual

FOUR = cluster_of(1.0, 1.0, 1.0, 1.0)
LIMITS: dict[str, Any] = {"outlier_norm": 4.0, "outlier_cosine": -0.3}
FORMS: list[dict[str, Any]] = [
    {"period": 4},
    {"period": 4, "outer_lr": 1.0, "outer_momentum": 0.0},
    {"period": 4, "fragments": 2, "delay": 1, "mix": 0.5},
    {"period": 4, "codec": TopK(1.0)},
    {"period": 4, "on": "server"},
]
BAD = 2  # the worker that is poisoned
POISONS = {
    "nan": lambda change: change * math.nan,
    "long": lambda change: change * 1e6,
    "flipped": lambda change: -change,
}


@dataclass(frozen=True, kw_only=True)
class Alike(Bowls):
    """Bowls whose minima are close to each other; worker 2's gradients may be poisoned."""

    poison: str = ""

    def gradient(self, model: nn.Module, batch: Batch) -> Tensor:
        worker = next(i for i, built in enumerate(self.built) if built is model)
        w = flat(model)
        self.w_local[worker].append(w)
        gradient = CURVATURE * (w - near(worker))
        if self.poison and worker == BAD:
            gradient = POISONS[self.poison](gradient)
        next(iter(model.parameters())).grad = gradient
        return torch.zeros(())


def near(worker: int) -> Tensor:
    return 2 + 0.1 * target(worker)


def of_the_others(s: DiLoCo, rounds: int) -> Tensor:
    """w_global after some rounds of plain DiLoCo, with the mean over all workers but one."""
    w_global, v = torch.zeros(SIZE, dtype=torch.float64), torch.zeros(SIZE, dtype=torch.float64)
    for _ in range(rounds):
        ends = []
        for worker in {0, 1, 2, 3} - {BAD}:
            w = w_global.clone()
            for _ in range(s.period):
                w -= LR * CURVATURE * (w - near(worker))
            ends.append(w)
        outer_gradient = w_global - torch.stack(ends).mean(0)
        v = s.outer_momentum * v + outer_gradient
        w_global = w_global - s.outer_lr * (outer_gradient + s.outer_momentum * v)
    return w_global


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("form", [FORMS[0], FORMS[1], FORMS[3], FORMS[4]], ids=str)
def test_an_outlier_does_not_change_what_the_others_train(form: dict[str, Any], poison: str) -> None:
    """While gradients point to one middle: after three rounds, workers are on different sides of it."""
    task = Alike(poison=poison)
    strategy = DiLoCo(**{"outer_lr": 0.3, "outer_momentum": 0.5, **LIMITS, **form})
    rounds = 2
    run = play(FOUR, strategy, rounds * strategy.period, task=task)
    expected = of_the_others(strategy, rounds)
    for weights in [*run.weights, task.published[-1]]:
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-9)
    if form.get("on") == "server" and poison == "nan":
        assert run.each("refused") == [0, 0, rounds, 0], "a server uses no update that is not finite"
    else:
        assert run.each("outliers") == [0, 0, rounds, 0]


def test_who_is_left_out_of_a_fragment_starts_again_from_the_global_weights() -> None:
    """With `mix` it would keep half of what it has: of NaN, all."""
    task = Alike(poison="nan")
    run = play(FOUR, DiLoCo(**LIMITS, **FORMS[2]), 16, task=task)
    assert all(weights.isfinite().all() for i, weights in enumerate(run.weights) if i != BAD)
    assert task.published[-1].isfinite().all()
    assert run.each("outliers") == [0, 0, 8, 0]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_without_outliers_the_result_is_the_same_bit_for_bit(form: dict[str, Any]) -> None:
    results = []
    for limits in ({}, {"outlier_norm": 1e6, "outlier_cosine": -1.0}):
        task = Bowls()
        run = play(FOUR, DiLoCo(**limits, **form), 16, task=task, evaluate_every=4)
        results.append(torch.stack([*run.weights, *task.published]))
        assert run.each("outliers") == [0] * 4
    assert torch.equal(*results)


def test_if_nobody_is_left_the_global_weights_stay() -> None:
    class Lost(Alike):
        def gradient(self, model: nn.Module, batch: Batch) -> Tensor:
            next(iter(model.parameters())).grad = torch.full((SIZE,), math.nan, dtype=torch.float64)
            return torch.zeros(())

    for form in FORMS:
        task = Lost()
        run = play(FOUR, DiLoCo(**LIMITS, **form), 8, task=task)
        assert not task.published[-1].any(), form
        assert min(map(sum, zip(run.each("outliers"), run.each("refused"), strict=True))) >= 2


def test_one_is_left_out_after_the_other() -> None:
    east, west, north = [1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]
    assert find_outliers([1.0] * 3, [east, east, west], None, -0.5) == {2}, "the first two are left"
    assert find_outliers([1.0] * 5, [east, west, east, east, west], None, -0.5) == {1, 4}
    assert find_outliers([1.0] * 2, [east, west], None, -0.5) == set(), "of two nobody knows which"
    assert find_outliers([1.0] * 3, [east, east, north], None, -0.5) == set()
    assert find_outliers([1.0, 2.0, math.inf, 9.0], [[]] * 4, 4.0, None) == {2, 3}
    assert find_outliers([1.0, math.nan], [[]] * 2, 4.0, None) == {1}
    assert find_outliers([0.0] * 3, [[0.0]] * 3, 2.0, 0.5) == set(), "no change, no angle"


@given(sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=3), seed=st.integers(0, 9))
def test_a_sketch_keeps_norms_and_angles(sizes: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    anchors = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    changes = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    there, back, plain = (torch.zeros(1 + rows, dtype=torch.float64) for rows in (ROWS, ROWS, 0))
    measure([a + c for a, c in zip(anchors, changes, strict=True)], anchors, there)
    measure([a - c for a, c in zip(anchors, changes, strict=True)], anchors, back)
    measure([a + c for a, c in zip(anchors, changes, strict=True)], anchors, plain)
    norm = torch.cat(changes).norm().item()
    assert there[0].item() == plain[0].item() == pytest.approx(norm)
    torch.testing.assert_close(there[1:], -back[1:], rtol=1e-9, atol=1e-9)
    assert there[1:].norm().item() == pytest.approx(norm, rel=0.5, abs=1e-9)


def test_an_exclusion_is_an_event() -> None:
    from offbeat.core.ledger import WorkerTotals

    events = EventList()
    for outliers in (0, 1, 1, 2):
        events.update([WorkerTotals(0), WorkerTotals(1, outliers=outliers)], None, 1.0)
    text = "a change of rank 1 was left out of a merge: an outlier"
    assert [tuple(told) for told in events.told] == 2 * [(1.0, "outlier", text)]


def test_what_cannot_be_guarded_is_refused() -> None:
    with pytest.raises(SettingError, match="eager=True with outlier_norm"):
        DiLoCo(eager=True, outlier_norm=3.0)
    with pytest.raises(SettingError, match=r"outlier_norm=0\.5: a finite number, at least 1"):
        DiLoCo(outlier_norm=0.5)
    with pytest.raises(SettingError, match="elastic=True with outlier_norm"):
        DiLoCo(outlier_cosine=0.0).check_elastic(2)
