"""PushPull: when the pull of a step overlaps with the next, and what is pushed under which optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Muon, Optimizer, RMSprop

import offbeat
from offbeat import ASP, BSP, DSSP, GSSP, SSP, Strategy


@pytest.mark.parametrize(
    ("strategy", "overlaps"),
    [
        (ASP(), True),
        (ASP(overlap=False), False),
        (SSP(staleness=0), False),
        (SSP(staleness=1), True),
        (SSP(staleness=1, overlap=False), False),
        (DSSP(low=0, high=4), False),
        (DSSP(low=1, high=1), True),
        (DSSP(low=1, high=4, overlap=False), False),
    ],
    ids=str,
)
def test_pulls_overlap_where_the_bound_leaves_room(strategy: Any, overlaps: bool) -> None:
    assert strategy.overlaps is overlaps


# --- what is pushed


class Own(Adam):
    """An optimizer of the user's, which a server does not know."""


def _two(first: Callable[..., Optimizer], second: Callable[..., Optimizer]) -> list[Optimizer]:
    model = nn.Linear(3, 2)
    return [first([model.weight], lr=0.1), second([model.bias], lr=0.1)]


def _one(make: Callable[..., Optimizer]) -> list[Optimizer]:
    return [make(nn.Linear(3, 2, bias=False).parameters(), lr=0.1)]


@pytest.mark.parametrize(
    ("optimizers", "push"),
    [
        (_one(SGD), "update"),
        (_one(Adam), "gradient"),
        (_one(RMSprop), "gradient"),
        (_two(AdamW, Adam), "gradient"),
        (_two(SGD, Adam), "update"),
        (_two(Muon, AdamW), "update"),
        (_one(Adafactor), "update"),
        (_one(Own), "update"),
    ],
    ids=lambda each: each if isinstance(each, str) else "+".join(type(o).__name__ for o in each),
)
def test_gradients_are_pushed_to_adaptive_optimizers_that_a_server_can_run(
    optimizers: Sequence[Optimizer], push: str
) -> None:
    for strategy in (ASP(), SSP(), DSSP(), GSSP(sparse=offbeat.GDTopK(epoch_steps=4))):
        assert strategy.for_optimizers(optimizers).push == push
        assert strategy.for_optimizers(optimizers).server_half().owns_optimizer == (push == "gradient")
    for chosen in (SSP(push="update"), SSP(push="gradient")):
        assert chosen.for_optimizers(optimizers) is chosen, "whoever says what to push is believed"


def _trained(strategy: Strategy[Any], optimizer: Any, steps: int, **options: Any) -> Tensor:
    torch.manual_seed(0)
    data = (torch.randn(32, 4), torch.randn(32, 1))
    result = offbeat.simulate(
        **{
            "model": nn.Linear(4, 1),
            "loss": lambda model, batch: (model(batch[0]) - batch[1]).pow(2).mean(),
            "data": data,
            "workers": 3,
            "batch_size": 2,
            **options,
        },
        optimizer=optimizer,
        strategy=strategy,
        steps=steps,
        work="equal",
    )
    return torch.cat([p.detach().flatten() for p in result.model.parameters()])


@pytest.mark.virtual
def test_without_staleness_the_default_is_bsp_under_adam() -> None:
    bsp, ours, updates = (
        _trained(strategy, lambda params: Adam(params, lr=0.05), 8)
        for strategy in (BSP(), SSP(staleness=0), SSP(staleness=0, push="update"))
    )
    torch.testing.assert_close(ours, bsp)
    assert (updates - bsp).abs().max() > 0.01


@pytest.mark.virtual
@pytest.mark.parametrize("strategy", [ASP(push="gradient"), SSP(staleness=1, push="gradient")], ids=str)
def test_a_push_of_one_of_n_workers_decays_weights_by_an_nth(strategy: Strategy[Any]) -> None:
    """A gradient of zeros: only weight decay moves the weights, 1 − ηλ/N at each of N pushes per step."""
    rate, decay, workers, steps = 0.1, 0.5, 4, 3
    start = nn.Linear(4, 1)
    trained = _trained(
        strategy,
        lambda params: SGD(params, lr=rate, weight_decay=decay),
        steps,
        model=start,
        loss=lambda model, batch: 0 * model(batch[0]).sum(),
        workers=workers,
    )
    expected = torch.cat([p.detach().flatten() for p in start.parameters()])
    expected *= (1 - rate * decay / workers) ** (workers * steps)
    torch.testing.assert_close(trained, expected)
