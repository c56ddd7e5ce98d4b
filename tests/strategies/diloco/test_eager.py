"""Eager DiLoCo: its rule with torch's own optimizer, two rounds in numbers, what it hides, and refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offbeat import DiLoCo, ErrorFeedback, SettingError, TopK
from offbeat.strategies.diloco.eager import OwnPart
from tests.support.diloco_bowls import CURVATURE, LR, SIZE, Bowls, target
from tests.support.loops import flat
from tests.support.virtual_runs import BYTES_PER_S, close, cluster_of, play

pytestmark = pytest.mark.virtual


class Outer:
    """An outer optimizer: torch's SGD with Nesterov momentum, on one vector."""

    def __init__(self, strategy: DiLoCo) -> None:
        self.w = torch.zeros(SIZE, dtype=torch.float64)
        mu = strategy.outer_momentum
        self._sgd = torch.optim.SGD([self.w], lr=strategy.outer_lr, momentum=mu, nesterov=mu > 0)

    def step(self, outer_gradient: Tensor) -> Tensor:
        self.w.grad = outer_gradient
        self._sgd.step()
        return self.w.clone()


def by_hand(s: DiLoCo, world: int, steps: int) -> tuple[list[list[Tensor]], list[Tensor]]:
    """All workers' weights before each step and after the last, and the published ones after each: every
    worker has an outer optimizer of its own, which gets its own part now and the others' a period later."""
    outers = [Outer(s) for _ in range(world)]
    shared, published = Outer(s), []
    history = [[outer.w.clone()] for outer in outers]
    sent: list[Tensor] = []
    for t in range(1, steps + 1):
        w = [seen[-1] - LR * CURVATURE * (seen[-1] - target(i)) for i, seen in enumerate(history)]
        if t % s.period == 0:
            fresh = [outer.w - mine for outer, mine in zip(outers, w, strict=True)]
            if sent:
                shared.step(sum(sent) / world)
            others = (
                [sum(sent) / world - one / world for one in sent] if sent else [torch.zeros(SIZE)] * world
            )
            w = [
                outer.step(new / world + late) for outer, new, late in zip(outers, fresh, others, strict=True)
            ]
            sent = fresh
        for seen, mine in zip(history, w, strict=True):
            seen.append(mine)
        published.append(shared.w.clone())
    return history, published


@given(
    period=st.integers(1, 5),
    outer_lr=st.floats(0.1, 1.2),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    codec=st.sampled_from([None, TopK(1.0), ErrorFeedback(TopK(1.0))]),  # which lose nothing
    world=st.integers(2, 3),
    steps=st.integers(1, 24),
)
@settings(deadline=None, max_examples=40)
def test_it_does_what_its_rule_says(
    period: int, outer_lr: float, momentum: float, codec: Any, world: int, steps: int
) -> None:
    strategy = DiLoCo(period=period, outer_lr=outer_lr, outer_momentum=momentum, codec=codec, eager=True)
    task = Bowls()
    play(cluster_of(*[1.0] * world), strategy, steps, task=task, evaluate_every=1)
    task.expect(*by_hand(strategy, world, steps))


def test_two_rounds_of_two_workers_in_numbers() -> None:
    """η = 1/2, μ = 1/2. Round 1: from 0 to 4 and to 8; round 2: 2 more, and 6 more."""
    w = [torch.tensor([4.0]), torch.tensor([8.0])]
    parts = [OwnPart(), OwnPart()]
    sent = [torch.zeros(1), torch.zeros(1)]  # w_global, of which no mean has arrived yet
    for part in parts:
        part.allocate([torch.zeros(1)], momentum=True)
    for part, weight, w_global in zip(parts, w, sent, strict=True):
        part.restart(0, weight, w_global, 1 / 2, 0.5, 0.5)
    # u = 2 and 4; s = ½(2 + ½·2) and ½(4 + ½·4)
    assert [weight.item() for weight in w] == [1.5, 3.0]
    assert [change.item() for change in sent] == [4.0, 8.0]
    w[0] += 2
    w[1] += 6
    sent = [torch.tensor([4.5]), torch.tensor([4.5])]  # the mean is 6, v = 6: w_global = ½(6 + ½·6)
    for part, weight, w_global in zip(parts, w, sent, strict=True):
        part.restart(0, weight, w_global, 1 / 2, 0.5, 0.5)
    # u = ½·2 + 1 and ½·4 + 3; s = 4.5 + ½(1 + ½·2) and 4.5 + ½(3 + ½·5)
    assert [weight.item() for weight in w] == [5.5, 7.25]
    assert [change.item() for change in sent] == [2.0, 6.0]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_single_worker_trains_as_under_diloco(momentum: float) -> None:
    """Bit for bit, since it runs as one of DiLoCo; by the rule, which is the same for it, to rounding."""
    trained, published = [], []
    for eager in (False, True):
        task = Bowls()
        strategy = DiLoCo(period=4, outer_momentum=momentum, eager=eager)
        play(cluster_of(1.0), strategy, 20, task=task, evaluate_every=4)
        trained.append(torch.stack([*task.w_local[0], flat(task.built[0])]))
        published.append(torch.stack(task.published))
    assert torch.equal(*trained) and torch.equal(*published)
    history, _ = by_hand(DiLoCo(period=4, outer_momentum=momentum, eager=True), 1, 20)
    torch.testing.assert_close(trained[1], torch.stack(history[0]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("step_s", [0.0004, 0.001, 0.1])
@pytest.mark.parametrize("period", [1, 5])
def test_an_exchange_has_a_period_to_hide_behind(period: int, step_s: float) -> None:
    """Two workers own 31 and 32 of 63 lines. The way to the owners has the first half of a period, the longer
    one, and the way back the second. The end of training waits for the last one to the owners."""
    rounds = 4
    run = play(cluster_of(step_s, step_s), DiLoCo(period=period, eager=True), rounds * period)
    way_s = 32 * 64 / BYTES_PER_S
    halves = ((period - period // 2) * step_s, period // 2 * step_s)
    waits = (rounds - 1) * sum(max(0.0, way_s - hidden_s) for hidden_s in halves) + way_s
    assert run.seconds == close(rounds * period * step_s + waits)
    assert run.each("wait_s") == [close(waits)] * 2
    there, back = rounds, rounds - 1
    assert run.each("bytes_sent") == [64 * (32 * there + 31 * back), 64 * (31 * there + 32 * back)]


def test_no_worker_waits_for_one_that_is_less_than_half_a_period_behind() -> None:
    eager = play(cluster_of(0.1, 0.11), DiLoCo(period=10, eager=True), 30)
    plain = play(cluster_of(0.1, 0.11), DiLoCo(period=10), 30)
    assert plain.each("wait_s")[0] > 0.2
    assert eager.each("wait_s")[1] < 0.01


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"fragments": 2, "period": 4}, "eager=True with fragments=2: .* leave fragments out"),
        ({"delay": 1}, "eager=True with delay=1: .* leave delay out"),
        ({"mix": 0.5}, "eager=True with mix=0.5: .* leave mix out"),
    ],
    ids=str,
)
def test_settings_that_it_replaces_are_refused(bad: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        DiLoCo(eager=True, **bad)
