"""Looking is free over processes, too: `consensus()` waits for nothing that is in flight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from offbeat import OSP, SSDSGD, SSP, DiLoCo, attach
from tests.conformance.table import AnyStrategy
from tests.support.crew import Crew
from tests.support.limits import HANG_S
from tests.support.lost import patched

pytestmark = pytest.mark.processes

STEPS = 6
OVERLAPPING: list[AnyStrategy] = [
    OSP(budget=0.9, growth=0),
    SSDSGD(warmup=0, delay=3),
    DiLoCo(period=3, delay=2),
    SSP(staleness=1),
]


def _drained(strategy: AnyStrategy, patch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Train, and look after each step; return how often that drained, and how often `settle()` did."""
    drained: list[bool] = []
    usual = type(strategy).drain

    async def drain(self: Any, *args: Any) -> None:
        drained.append(True)
        await usual(self, *args)

    patch.setattr(type(strategy), "drain", drain)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(model, optimizer, strategy, timeout_s=HANG_S) as sync:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(8, 20)).square().mean().backward()
            optimizer.step()
            with sync.consensus():
                pass
        looks = len(drained)
        sync.settle()
        return looks, len(drained) - looks


@pytest.mark.parametrize("strategy", OVERLAPPING, ids=lambda strategy: strategy.name)
def test_consensus_drains_nothing(crew: Callable[[int], Crew], strategy: AnyStrategy) -> None:
    assert crew(2).run(patched, _drained, strategy) == [(0, 1), (0, 1)]
