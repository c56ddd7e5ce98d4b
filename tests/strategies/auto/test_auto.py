"""Auto in virtual time: when it changes, by hand; what it trains, against copies; and that it is BSP else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offbeat import BSP, Auto
from offbeat.core.ledger import Ledger
from offbeat.worlds.virtual.cluster import Cluster
from offbeat.worlds.virtual.rates import ChangingRate
from offbeat.worlds.virtual.session import VirtualSession
from offbeat.worlds.virtual.simulation import run_workers
from tests.support.scripted_auto import CHANGES, ScriptedAuto
from tests.support.virtual_runs import BYTES_PER_S, MARKED, WEIGHTS, Run, close, cluster_of, play, ring_s

pytestmark = pytest.mark.virtual

STEP_S = 0.001
SLOW_LINK = cluster_of(STEP_S, STEP_S)  # an exchange takes 4 ms
WINDOW = 4
LEAVES = 2 * WINDOW + 1  # the last step of BSP: two windows, and the step in which their numbers arrive
EXCHANGE_S = ring_s(MARKED, 2)
AVERAGE_S = ring_s(WEIGHTS, 2)


def news(ledger: Ledger) -> list[str]:
    return [text for _, _, kind, text in ledger.events if kind == "changed"]


def changes(run: Run) -> list[str]:
    """Return what the run changed to, told by worker 0 alone."""
    assert not any(news(ledger) for ledger in run.ledgers[1:])
    return [text.partition(" instead of ")[0] for text in news(run.ledgers[0])]


@pytest.mark.parametrize("step_s", [(0.1, 0.1), (0.1, 0.3)], ids=["equal", "straggler"])
def test_on_a_fast_link_it_is_bsp_to_the_bit_and_to_the_second(step_s: tuple[float, ...]) -> None:
    """An exchange takes 4% of a step: LocalSGD could not save a tenth."""
    fast = cluster_of(*step_s)
    bsp, auto = (play(fast, strategy, 38) for strategy in (BSP(), Auto(window=WINDOW)))
    assert not changes(auto)
    assert auto.seconds == bsp.seconds
    assert all(map(torch.equal, auto.weights, bsp.weights))


def test_on_a_slow_link_it_changes_when_two_windows_agree() -> None:
    run = play(SLOW_LINK, Auto(window=WINDOW), LEAVES + 17)
    assert changes(run) == ["LocalSGD(period=8)"]
    assert run.seconds == close(LEAVES * (STEP_S + EXCHANGE_S) + 17 * STEP_S + 2 * AVERAGE_S)
    windows = 4  # two of BSP, and one for each average
    assert run.each("bytes_sent") == [LEAVES * MARKED + 2 * WEIGHTS + windows * 40] * 2


@pytest.mark.parametrize(("longest", "period"), [(2, 2), (5, 4)])
def test_no_period_is_longer_than_the_longest(longest: int, period: int) -> None:
    run = play(SLOW_LINK, Auto(window=WINDOW, longest=longest), LEAVES + 9)
    assert changes(run) == [f"LocalSGD(period={period})"]
    averages = 8 // period
    assert run.seconds == close(LEAVES * (STEP_S + EXCHANGE_S) + 9 * STEP_S + averages * AVERAGE_S)


def test_a_gain_that_cannot_be_had_keeps_bsp() -> None:
    assert not changes(play(SLOW_LINK, Auto(window=WINDOW, gain=0.9), 30))


def test_the_reason_is_told() -> None:
    (text,) = news(play(SLOW_LINK, Auto(window=WINDOW), LEAVES + 1).ledgers[0])
    assert text == (
        "LocalSGD(period=8) instead of BSP: an exchange takes 4 times as long as computing (K/C), "
        "the slowest worker 1 times as long as the fastest, and a step 0.00504 s"
    )


def varying(*rates: tuple[float, float]) -> Cluster:
    """Links that begin at 1 MB/s, and are so many times as fast from these seconds on."""
    slow = 8 * BYTES_PER_S
    link = ChangingRate(slow, tuple((at_s, slow * by) for at_s, by in rates))
    one = replace(SLOW_LINK.workers[0], up_bits_per_s=link, down_bits_per_s=link)
    return replace(SLOW_LINK, workers=(one, one))


def test_it_goes_back_when_the_link_has_become_fast() -> None:
    run = play(varying((0.08, 100.0)), Auto(window=WINDOW), 120)
    assert changes(run) == ["LocalSGD(period=8)", "BSP"]
    assert torch.equal(run.weights[0], run.weights[1])


def test_a_link_that_comes_and_goes_makes_it_change_seldom() -> None:
    """Slow and fast for 60 ms in turn: without patience it would change with every turn."""
    turns = [(0.06 * number, 100.0 if number % 2 else 1.0) for number in range(1, 20)]
    run = play(varying(*turns), Auto(window=WINDOW), 500)
    assert run.seconds > turns[-1][0] / 2
    assert 1 <= len(changes(run)) <= 5


def test_a_link_that_changes_within_a_window_makes_it_change_once() -> None:
    turns = [(0.004 * number, 2.0 if number % 2 else 1.0) for number in range(1, 100)]
    assert changes(play(varying(*turns), Auto(window=WINDOW), 150)) == ["LocalSGD(period=8)"]


# --- what it trains

SIZE, WORLD, STEPS, LR, MOMENTUM = 16, 3, 16, 0.1, 0.9


def gradient_of(rank: int, step: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(100 * rank + step))


def optimizer_of(params: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=LR, momentum=MOMENTUM)


def trained(strategy: Auto) -> list[list[Tensor]]:
    """Return the weights of each worker after every step."""

    def build(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.ParameterList([nn.Parameter(torch.ones(SIZE))])
        return model, optimizer_of(model.parameters())

    def gradient(model: nn.Module, batch: tuple[int, int]) -> Tensor:
        for param in model.parameters():
            param.grad = gradient_of(*batch)
        return torch.zeros(())

    async def train(session: VirtualSession) -> list[Tensor]:
        seen = []
        for step in range(STEPS):
            await session.backward((session.rank, step), samples=1)
            await session.update()
            seen.append(next(session.model.parameters()).detach().clone())
        return seen

    made = run_workers(WORLD, cluster_of(*[STEP_S] * WORLD), strategy, build, gradient, train)
    return [weights for weights in made if weights is not None]


def by_hand() -> list[list[Tensor]]:
    """BSP and LocalSGD as the script has them; back to BSP, weights and momentum are averaged."""
    params = [nn.Parameter(torch.ones(SIZE)) for _ in range(WORLD)]
    optimizers = [optimizer_of([param]) for param in params]
    seen: list[list[Tensor]] = [[] for _ in range(WORLD)]
    period = local = 0

    def average(tensors: list[Tensor]) -> None:
        mean = torch.stack([tensor.detach() for tensor in tensors]).mean(0)
        for tensor in tensors:
            tensor.detach().copy_(mean)

    for step in range(STEPS):
        grads = [gradient_of(rank, step) for rank in range(WORLD)]
        for param, grad, optimizer in zip(params, grads, optimizers, strict=True):
            param.grad = grad if period else torch.stack(grads).mean(0)
            optimizer.step()
        local += 1
        if period and local % period == 0:
            average(list(params))
        if step + 1 in CHANGES:
            period, local = CHANGES[step + 1], 0
            if not period:
                average(list(params))
                average([o.state[p]["momentum_buffer"] for o, p in zip(optimizers, params, strict=True)])
        for rank, param in enumerate(params):
            seen[rank].append(param.detach().clone())
    return seen


def test_it_trains_what_copies_train_through_all_changes() -> None:
    for one, other in zip(trained(ScriptedAuto()), by_hand(), strict=True):
        for step, (ours, theirs) in enumerate(zip(one, other, strict=True), 1):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=f"step {step}")


def test_workers_hold_the_same_weights_under_bsp_and_their_own_between_averages() -> None:
    workers = trained(ScriptedAuto())
    same = [all(torch.equal(workers[0][t], other[t]) for other in workers) for t in range(STEPS)]
    # BSP 1-3; local 4, averaged 5, changed in 6; BSP 7-9; local 10-12, averaged 13; local 14-16
    assert [step for step, equal in enumerate(same, 1) if not equal] == [4, 10, 11, 12, 14, 15, 16]
