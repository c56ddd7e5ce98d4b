"""How well SSD-SGD trains, in virtual time: as BSP does, where the authors' local steps do not."""

from __future__ import annotations

from typing import Any

import pytest

from offbeat import BSP, SSDSGD
from offbeat.experiments.job import Job
from offbeat.experiments.virtual_run import simulate
from tests.support.softmax import Softmax
from tests.support.virtual_runs import cluster_of

pytestmark = pytest.mark.virtual


def _accuracy(strategy: Any, lr: float, adaptive: bool) -> float:
    task = Softmax(lr=lr, adaptive=adaptive)
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
