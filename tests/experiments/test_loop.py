"""The training loop: what it calls, in which order, and what it seeds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from offbeat.strategies.bsp import BSP
from tests.support.virtual_runs import Kept, cluster_of, play

pytestmark = pytest.mark.virtual


@dataclass(frozen=True, kw_only=True)
class Clipped(Kept):
    max_norm: ClassVar[float | None] = 0.5
    lr: float = 0.1


def test_gradients_are_clipped_before_the_optimizer_steps() -> None:
    """From w = 1 with gradients far above the norm, a step of plain descent goes lr · norm far."""
    (weights,) = play(cluster_of(1.0), BSP(), 1, task=Clipped(noise=0.0)).weights
    assert (weights - 1).norm().item() == pytest.approx(0.1 * 0.5, rel=1e-4)
    (free,) = play(cluster_of(1.0), BSP(), 1, task=Kept(noise=0.0, lr=0.1)).weights
    assert (free - 1).norm().item() > 1
