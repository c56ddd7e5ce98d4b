"""LocalSGD: steps alone, then the mean of all weights, by its formulas, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offbeat import LocalSGD, SettingError, TopK
from offbeat.core.conductor import Conductor
from offbeat.core.ledger import Ledger
from offbeat.core.port import Port
from offbeat.core.replica import Replica
from tests.support.exchanges import equal_workers, virtually

pytestmark = pytest.mark.virtual

SIZE = 16  # a multiple of the alignment: no gaps
LR = 0.5


def gradient(rank: int, step: int) -> Tensor:
    return torch.arange(SIZE, dtype=torch.float32) + 10 * rank + step


async def trained(port: Port, strategy: LocalSGD, steps: int, samples: list[int]) -> list[Tensor]:
    """Train with given gradients; return the weights after every step."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(SIZE))])
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    replica = Replica(model, optimizer=optimizer)
    conductor: Conductor[Any] = Conductor(strategy, replica, port, Ledger(port.rank, lambda: 0.0))
    seen = []
    for step in range(steps):
        replica.inputs.upcoming += samples[port.rank]
        model[0].grad = gradient(port.rank, step)
        await conductor.begin()
        optimizer.step()
        await conductor.update()
        seen.append(model[0].detach().clone())
    return seen


def weights_of(
    strategy: LocalSGD, world: int, steps: int, samples: list[int] | None = None
) -> list[list[Tensor]]:
    counts = samples or [1] * world
    return [made for made, _ in virtually(trained, equal_workers(world), strategy, steps, counts)]


def by_formula(period: int, world: int, steps: int, samples: list[int]) -> list[list[Tensor]]:
    weights = [torch.zeros(SIZE) for _ in range(world)]
    seen: list[list[Tensor]] = [[] for _ in range(world)]
    for step in range(steps):
        weights = [weight - LR * gradient(rank, step) for rank, weight in enumerate(weights)]
        if (step + 1) % period == 0:
            mean = sum(n / sum(samples) * weight for n, weight in zip(samples, weights, strict=True))
            assert isinstance(mean, Tensor)
            weights = [mean] * world
        for rank, weight in enumerate(weights):
            seen[rank].append(weight)
    return seen


def assert_close(ours: list[list[Tensor]], theirs: list[list[Tensor]]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("period", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_it_does_what_its_formula_says(period: int, world: int) -> None:
    assert_close(weights_of(LocalSGD(period=period), world, 7), by_formula(period, world, 7, [1] * world))


def test_weighted_by_the_samples_that_each_has_seen() -> None:
    strategy = LocalSGD(period=2, weighted=True)
    assert_close(weights_of(strategy, 3, 6, [1, 2, 5]), by_formula(2, 3, 6, [1, 2, 5]))


@pytest.mark.parametrize("weighted", [False, True])
def test_a_codec_that_loses_nothing_changes_nothing_but_rounding(weighted: bool) -> None:
    coded = LocalSGD(period=2, weighted=weighted, codec=TopK(1.0))
    samples = [1, 3] if weighted else [1, 1]
    assert_close(weights_of(coded, 2, 6, samples), by_formula(2, 2, 6, samples))


def test_with_a_codec_all_hold_the_same_after_each_average() -> None:
    one, other = weights_of(LocalSGD(period=2, codec=TopK(0.25)), 2, 6)
    for step in (1, 3, 5):
        assert torch.equal(one[step], other[step])
    assert not torch.equal(one[0], other[0])


@pytest.mark.parametrize("period", [0, -1, 2.5, "4", None])
def test_bad_settings_are_refused(period: Any) -> None:
    with pytest.raises(SettingError, match="period="):
        LocalSGD(period=period)
