"""How well SSD-SGD trains, in virtual time: as BSP does, where the authors' local steps do not.

Softmax regression on the digits: convex, so that rounding on another processor changes nothing that shows.
All 1,797 images count, so that one of them is 0.06 points.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from offbeat import BSP, SSDSGD
from offbeat.experiments.job import Job
from offbeat.experiments.tasks.base import Data
from offbeat.experiments.tasks.digits import Digits
from offbeat.experiments.virtual_run import simulate
from tests.support.virtual_runs import cluster_of

pytestmark = pytest.mark.virtual


@dataclass(frozen=True, kw_only=True)
class Softmax(Digits):
    """The digits, by a linear model."""

    adaptive: bool = False

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def optimizer(self, model: nn.Module) -> Optimizer:
        if self.adaptive:
            return AdamW(model.parameters(), lr=self.lr)
        return SGD(model.parameters(), lr=self.lr, momentum=0.9)

    def evaluate(self, model: nn.Module, data: Data) -> float:
        images: Any = data
        parts = [images.train, images.test]
        inputs, targets = (torch.cat([part[i] for part in parts]) for i in range(2))
        with torch.no_grad():
            return float((model(inputs).argmax(1) == targets).float().mean())


def _accuracy(strategy: Any, lr: float, adaptive: bool) -> float:
    task = Softmax(lr=lr, adaptive=adaptive, batch_size=16)
    job = Job(task=task, strategy=strategy, workers=8, steps=80, evaluate_every=80)
    return 100 * simulate(job, cluster_of(*[0.1] * 8), task.load())[-1].value


@pytest.mark.parametrize(("lr", "adaptive"), [(0.2, False), (0.02, True)], ids=["momentum", "adamw"])
def test_within_a_few_images_of_bsp_where_the_authors_rule_is_not(lr: float, adaptive: bool) -> None:
    bsp, carried, authors = (
        _accuracy(strategy, lr, adaptive)
        for strategy in (BSP(), SSDSGD(warmup=0), SSDSGD(rule="authors", warmup=20, alpha=2.0))
    )
    assert carried >= bsp - 0.3
    assert authors < bsp - 0.5
