"""MuLoCo: DiLoCo with Muon inside, on a tiny transformer; equal to a loop of two workers written by hand."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Muon, Optimizer

from offbeat import DiLoCo, ErrorFeedback, Quantize
from offbeat.experiments.tasks.models.transformer import Transformer
from offbeat.worlds.virtual.session import VirtualSession, autograd
from offbeat.worlds.virtual.simulation import run_workers
from tests.support.loops import flat
from tests.support.virtual_runs import cluster_of

pytestmark = pytest.mark.virtual

STEPS, WORLD, TOKENS, CONTEXT = 50, 2, 11, 8


def build(rank: int) -> tuple[nn.Module, Sequence[Optimizer]]:
    """In float64: Muon's own arithmetic is coarse, and would magnify differences of float32's rounding."""
    torch.manual_seed(0)
    model = Transformer(tokens=TOKENS, context=CONTEXT, layers=1, heads=2, width=16, hidden=32).double()
    return model, optimizers_of(model)


def optimizers_of(model: nn.Module) -> list[Optimizer]:
    """As docs/strategies/diloco.md says, at rates for so small a model."""
    matrices = [p for p in model.get_submodule("layers").parameters() if p.ndim == 2]
    inside = set(matrices)
    others = [p for p in model.parameters() if p not in inside]
    return [Muon(matrices, lr=0.01, adjust_lr_fn="match_rms_adamw"), AdamW(others, lr=0.01)]


def batch_of(rank: int, step: int) -> Tensor:
    """Rows in which 3x + 1 follows x, modulo 11."""
    rows = [torch.randint(TOKENS, (4, 1), generator=torch.Generator().manual_seed(1000 * rank + step))]
    for _ in range(CONTEXT):
        rows.append((3 * rows[-1] + 1) % TOKENS)
    return torch.cat(rows, 1)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def trained(strategy: DiLoCo) -> list[tuple[list[float], Tensor]]:
    """Each worker's losses, and its weights at the end."""

    async def train(session: VirtualSession) -> tuple[list[float], Tensor]:
        losses = []
        for step in range(STEPS):
            losses.append((await session.backward(batch_of(session.rank, step), samples=4)).item())
            await session.update()
        return losses, flat(session.model)

    results: Any = run_workers(WORLD, cluster_of(0.1, 0.1), strategy, build, autograd(loss_of), train)
    return list(results)


@pytest.mark.parametrize("period", [5, 10])
def test_it_equals_a_loop_written_by_hand(period: int) -> None:
    models = [build(0)[0], build(0)[0]]
    inner = [optimizers_of(model) for model in models]
    outer = copy.deepcopy(models[0])
    nesterov = SGD(outer.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for step in range(STEPS):
        for rank, (model, optimizers) in enumerate(zip(models, inner, strict=True)):
            model.zero_grad()
            loss_of(model, batch_of(rank, step)).backward()
            for optimizer in optimizers:
                optimizer.step()
        if (step + 1) % period == 0:
            for w_global, *w in zip(outer.parameters(), *(m.parameters() for m in models), strict=True):
                w_global.grad = w_global.detach() - sum(each.detach() for each in w) / WORLD
            nesterov.step()
            for model in models:
                model.load_state_dict(outer.state_dict())
    for (_, weights), model in zip(trained(DiLoCo(period=period)), models, strict=True):
        torch.testing.assert_close(weights, flat(model), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("codec", [None, ErrorFeedback(Quantize(2))], ids=str)
def test_the_loss_falls(codec: Any) -> None:
    for losses, _ in trained(DiLoCo(period=10, codec=codec)):
        assert losses[0] > 2 and sum(losses[-5:]) / 5 < 0.5
