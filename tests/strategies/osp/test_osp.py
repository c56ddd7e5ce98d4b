"""OSP: every gradient counts once, in its own step's rate; what is late is predicted, and only there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from offbeat import BSP, OSP
from tests.support.osp_linear import (
    LATE,
    MAKE,
    SIZES,
    STEPS,
    Coefficients,
    Linear,
    all_used,
    coefficients,
    played,
    some_unused,
    trained_by_osp,
)

# --- a loss that is linear in the weights: gradients are what the test says, whatever the weights are


@pytest.mark.parametrize("data", [all_used, some_unused])
@pytest.mark.parametrize("optimizer", MAKE)
@pytest.mark.parametrize("schedule", [False, True], ids=["", "schedule"])
def test_where_gradients_do_not_depend_on_weights_it_is_bsp_bit_for_bit(
    crew, optimizer: str, schedule: bool, data: Callable[[int], Coefficients]
) -> None:
    """Each gradient once, at its own rate, and the optimizer's state as if nothing were ever predicted."""
    bsp = crew(2).run(trained_by_osp, BSP(), optimizer, data, schedule)[0][0]
    for weights, lates in crew(2).run(trained_by_osp, LATE, optimizer, data, schedule):
        assert sum(map(bool, lates)) > STEPS - 4
        assert all(map(torch.equal, weights, bsp))


@pytest.mark.parametrize("world", [2, 4])
def test_after_all_has_come_in_weights_are_the_closed_form(crew, world: int) -> None:
    """Plain SGD: w₀ − η Σ ḡ, exactly, since all numbers are short."""
    means = [sum(coefficients(r)[t][k] for r in range(world)) / world for t in range(STEPS) for k in range(6)]  # type: ignore[misc, arg-type]
    expected = [w.detach() - 0.5 * sum(means[k::6]) for k, w in enumerate(Linear().parts)]
    for weights, lates in crew(world).run(trained_by_osp, LATE, "plain", all_used, False):
        assert all(lates[4:])
        assert all(map(torch.equal, weights, expected))


IMPORTANCES = ["weight-gradient", "gradient", "random"]


@pytest.mark.parametrize("importance", IMPORTANCES)
def test_all_ranks_split_alike(crew, importance: str) -> None:
    strategy = OSP(budget=0.5, growth=0, importance=importance)
    (_, one), (_, other) = crew(2).run(trained_by_osp, strategy, "plain", all_used, False)
    assert one == other
    assert any(one)
    if importance == "random":
        assert len(set(map(tuple, one))) > 3
    if importance == "gradient":
        assert one[4] == [0, 1, 3, 4], "gradients double from one to the next; 2 is too large beside 0 and 1"


@pytest.mark.parametrize("budget", [0.1, 0.3, 0.6, 1.0])
def test_the_budget_is_kept_and_used(crew, budget: float) -> None:
    sizes = [4 * n + 4 for n in SIZES]
    for _, lates in crew(2).run(trained_by_osp, OSP(budget=budget, growth=0), "plain", all_used, False):
        used = [sum(sizes[k] for k in late) for late in lates]
        assert max(used) <= budget * sum(sizes)
        left = budget * sum(sizes) - used[-1]
        assert all(sizes[k] > left for k in range(6) if k not in lates[-1]) or len(lates[-1]) == 5


def test_growth_is_linear(crew) -> None:
    _, lates = crew(2).run(trained_by_osp, OSP(budget=1.0, growth=10), "plain", all_used, False)[0]
    sizes = [4 * n + 4 for n in SIZES]
    for t, late in enumerate(lates):
        assert sum(sizes[k] for k in late) <= min(1.0, t / 10) * sum(sizes)
    assert len(lates[4]) < len(lates[-1]) == 5


def _predicted(correction: str) -> list[tuple[list[int], list[Tensor], list[Tensor], list[Tensor]]]:
    seen = []
    with played(OSP(budget=0.7, growth=0, correction=correction)) as play:
        for step in coefficients(play.rank):
            late = play.late
            play.step(step)
            seen.append((late, play.weights(), play.agreed(), step))
    return seen  # type: ignore[return-value]


def test_a_prediction_is_off_by_what_the_local_gradient_is_off(crew) -> None:
    """ŵ_i − w = −η(g_i − ḡ) on U, and nothing on I; over the workers it averages to zero."""
    for (late, mine, w, g), (_, theirs, w_there, g_there) in zip(
        *crew(2).run(_predicted, "lgp"), strict=True
    ):
        for k in range(6):
            assert torch.equal(w[k], w_there[k])
            mean = (g[k] + g_there[k]) / 2
            for predicted, local in ((mine, g), (theirs, g_there)):
                off = predicted[k] - w[k]
                assert torch.equal(off, -0.5 * (local[k] - mean) if k in late else torch.zeros_like(off))
            assert not (mine[k] + theirs[k] - 2 * w[k]).any()


def test_without_correction_it_is_off_by_a_whole_step(crew) -> None:
    for (late, mine, w, g), (_, theirs, _, g_there) in zip(*crew(2).run(_predicted, "none"), strict=True):
        for k in late:
            assert torch.equal(mine[k], theirs[k])
            assert torch.equal(mine[k] - w[k], 0.5 * (g[k] + g_there[k]) / 2)


def test_the_mixed_prediction_leans_on_the_mean_of_all(crew) -> None:
    """ŵ = w − η((1 − mix)·g_i + mix·m), where m is the running mean of ḡ of the steps before."""
    one, other = crew(2).run(_predicted, "ema-lgp")
    means = [torch.zeros(n) for n in SIZES]
    for t, ((late, mine, w, g), (_, _, _, g_there)) in enumerate(zip(one, other, strict=True)):
        for k in range(6):
            mean = (g[k] + g_there[k]) / 2
            if k in late:
                before = w[k] + 0.5 * mean
                expected = before - 0.5 * (0.5 * g[k] + 0.5 * means[k])
                torch.testing.assert_close(mine[k], expected, rtol=1e-5, atol=1e-4)
            means[k] += (mean - means[k]) * max(0.1, 1 / (t + 1))
