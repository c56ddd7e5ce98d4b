"""Memory of the strategies on real ranks: copies of the model beyond the bare loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import offbeat
from offbeat import (
    BSP,
    OSP,
    SSDSGD,
    SSP,
    DiLoCo,
    ErrorFeedback,
    Half,
    LocalSGD,
    Oscars,
    SelSync,
    TopK,
)
from offbeat.worlds.processes import pairwise
from tests.conformance.table import AnyStrategy
from tests.support import loops
from tests.support.allocations import counting_live_tensors
from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes

STEPS = 7  # a period and a half of each strategy, at least
SLACK = 0.15  # pieces of exchanges, marks, and samples


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)], nn.Linear(512, 5))  # 1 million


def _most_held(strategy: AnyStrategy | None, optimizer: str) -> float:
    """The most that is alive after a backward or a step, in copies of the model."""
    held = []
    with counting_live_tensors() as live_bytes:
        model = _model()
        opt = loops.OPTIMIZERS[optimizer](model)
        nbytes = sum(p.nbytes for p in model.parameters())
        sync: Any = strategy and offbeat.attach(model, opt, strategy, timeout_s=HANG_S)
        for _ in range(STEPS):
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(torch.ones(4, 512)), torch.zeros(4, dtype=torch.long))
            loss.backward()
            held.append(live_bytes())
            opt.step()
            held.append(live_bytes())
        if sync:
            sync.close()
    return max(held[4:]) / nbytes


def _copies(strategies: list[tuple[AnyStrategy, str]]) -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairwise, "PIECE_BYTES", 1 << 10)  # as if the model were large
        bare = {opt: _most_held(None, opt) for opt in {opt for _, opt in strategies}}
        return [_most_held(strategy, opt) - bare[opt] for strategy, opt in strategies]


def _cut(world: int) -> list[tuple[AnyStrategy, str, float]]:
    """Strategies that cut their state over the ranks, an optimizer, and the documented copies."""
    return [
        (DiLoCo(period=2), "adamw", 2 / world),
        (DiLoCo(period=4, delay=2, mix=0.5), "adamw", 1 + 2 / world),
        (DiLoCo(period=2, eager=True), "adamw", 3 + 2 / world),
        (SSDSGD(warmup=2, delay=5), "adamw", 1 + 4 / 5 * (world - 1) / world + 3 / world),
    ]


WHOLE: list[tuple[AnyStrategy, str, float]] = [  # with two ranks
    (BSP(), "adamw", 0.0),
    (LocalSGD(period=2), "adamw", 0.0),
    (SelSync(), "adamw", 0.0),
    (DiLoCo(period=2, outer_momentum=0.0, outer_lr=1.0), "adamw", 1 / 2),
    (DiLoCo(period=4, fragments=2, delay=1, average=0.5), "adamw", 1 / 2 + 3 / 2),
    (DiLoCo(period=2, codec=Half()), "adamw", 3 + 1 / 2),  # whole, and packets of half the size
    (SSDSGD(warmup=2, delay=3, staggered=False), "momentum", 1 + 3 / 2 + 2 / 2),
    (SSDSGD(warmup=2, delay=3), "sgd", 1 + 2 / 3 / 2 + 1 / 2),
    (SSDSGD(rule="authors", warmup=2, delay=3), "momentum", 3 + 2 / 2 - 1),
]
SERVED: list[tuple[AnyStrategy, str, float]] = [
    (SSP(push="update"), "adamw", 2.0),
    (SSP(), "adamw", 2.0 - 2),  # gradients are pushed: the state is the server's
    (SSP(codec=ErrorFeedback(TopK(0.01))), "adamw", 3.0 - 2),
    (Oscars(tau=2), "adamw", 1.0),
    (SSDSGD(on="server", warmup=2, delay=3), "adamw", 1 + 4.0),  # its counters travel as long as weights
    (SSDSGD(rule="authors", on="server", warmup=2, delay=3), "adamw", 3.0 - 2),  # the state is the server's
]


def _check(copies: list[float], expected: Sequence[tuple[AnyStrategy, str, float]]) -> None:
    for held, (strategy, opt, copies_said) in zip(copies, expected, strict=True):
        assert copies_said - SLACK <= held <= copies_said + SLACK, f"{strategy} with {opt}"


@pytest.mark.parametrize(("world", "expected"), [(2, _cut(2) + WHOLE), (4, _cut(4))])
def test_copies_of_the_model_beyond_the_bare_loop(
    crew, world: int, expected: list[tuple[AnyStrategy, str, float]]
) -> None:
    for copies in crew(world).run(_copies, [(strategy, opt) for strategy, opt, _ in expected]):
        _check(copies, expected)


def test_osp_holds_less_than_two_copies(crew) -> None:
    for (copies,) in crew(2).run(_copies, [(OSP(growth=2), "adamw")]):
        assert copies < 2


def test_copies_of_the_model_at_the_workers_of_a_server(crew) -> None:
    for copies in crew(2).run(_copies, [(strategy, opt) for strategy, opt, _ in SERVED]):
        _check(copies, SERVED)
