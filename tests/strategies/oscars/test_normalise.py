"""Where unequal local steps move the optimum, and how `normalise` corrects it: a closed form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offbeat import Oscars
from offbeat.experiments.tasks.base import Batch, Data
from tests.support.oscars_stage import Stage
from tests.support.virtual_runs import Kept, cluster_of, play
from tests.support.virtual_servers import WIDE

LR = 0.1
STEPS = (4, 1)  # of the fast worker and of the slow one, in a round


@dataclass(frozen=True, kw_only=True)
class Opposed(Kept):
    """Losses ½(w − 1)² of worker 0 and ½(w + 1)² of worker 1."""

    dimension: int = 1

    def gradient(self, model: nn.Module, batch: Batch) -> Tensor:
        w = model.get_parameter("w")
        optimum = 1.0 if model is self.built[0] else -1.0
        w.grad = w.detach() - optimum
        return torch.zeros(())

    def evaluate(self, model: nn.Module, data: Data) -> float:
        return model.get_parameter("w").item()


def settled(weights: tuple[float, float]) -> float:
    """Return where p_0 (1 − w)(1 − q^4) = p_1 (1 + w)(1 − q): H steps go 1 − q^H of the way, q = 1 − η."""
    fast, slow = (p * (1 - (1 - LR) ** h) for p, h in zip(weights, STEPS, strict=True))
    return (fast - slow) / (fast + slow)


@pytest.mark.virtual
@pytest.mark.parametrize(
    ("settings_", "weights", "about"),
    [
        ({}, (4, 1), 0.864),
        ({"weighted": False}, (1, 1), 0.549),
        ({"normalise": True}, (1 / 4, 1), -0.075),
        ({"normalise": True, "weighted": False}, (1 / 4, 1), -0.075),
    ],
    ids=str,
)
def test_a_worker_four_times_faster_moves_the_optimum_unless_normalised(
    settings_: dict[str, Any], weights: tuple[float, float], about: float
) -> None:
    """0 is right; p_i by samples, once more, would make it 0.549 with `normalise`, too."""
    steps = 400
    strategy = Oscars(tau=1, **settings_)
    run = play(
        cluster_of(0.1, 0.4, server=WIDE), strategy, steps, task=Opposed(lr=LR), evaluate_every=steps - 4
    )
    found = run.history[0].value
    assert found == pytest.approx(settled(weights), abs=1e-5)
    assert found == pytest.approx(about, abs=5e-4)


def test_a_larger_batch_still_counts_more() -> None:
    """4 steps of 8 samples, 2 of 24: p = 8/32 and 24/32, whatever the steps; their mean is 2.5."""
    stage = Stage(2, normalise=True)
    stage.step(0, 0.5, samples=32, steps=4)
    stage.step(1, 1.0, samples=48, steps=2)
    assert stage.weight == pytest.approx((0.25 * 0.5 + 0.75 * 1.0) * (0.25 * 4 + 0.75 * 2))
