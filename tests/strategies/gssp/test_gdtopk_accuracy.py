"""How well GDTopK trains, in virtual time: as GSSP does, thanks to floor, residual and dense pushes.

The last epochs of six send the floor's fraction, so it is the residual that carries most of what is learned.
"""

from __future__ import annotations

from typing import Any

import pytest

from offbeat import GSSP, GDTopK
from offbeat.experiments.job import Job
from offbeat.experiments.virtual_run import simulate
from tests.support.softmax import Softmax
from tests.support.virtual_runs import cluster_of
from tests.support.virtual_servers import WIDE

pytestmark = pytest.mark.virtual

EPOCH = 15  # steps


def _trained(epochs: int, sparse: GDTopK | None) -> tuple[float, float]:
    """Train; return the accuracy in percent, and the loss."""
    task = Softmax(lr=0.2)
    strategy: Any = GSSP(groups="0-3/4-7", push="update", sparse=sparse)
    steps = epochs * EPOCH
    job = Job(task=task, strategy=strategy, workers=8, steps=steps, evaluate_every=steps, work="equal")
    last = simulate(job, cluster_of(*[0.1] * 4, *[0.2] * 4, server=WIDE), task.load())[-1]
    return 100 * last.value, last.extra_metrics["nats"]


def test_within_a_few_images_of_gssp_where_the_authors_table_is_not() -> None:
    dense, sparse, table = (
        _trained(6, sparse)
        for sparse in (None, GDTopK(epoch_steps=EPOCH), GDTopK(epoch_steps=EPOCH, floor=0))
    )
    assert sparse[0] >= dense[0] - 0.3
    assert sparse[1] <= 1.1 * dense[1], "0.096 against 0.097; 0.123 if the residual is forgotten"
    assert table[0] < dense[0] - 5


def test_the_end_of_an_epoch_leaves_nothing_behind() -> None:
    """One entry in a hundred is sent, so most of an epoch's learning is in its last push."""
    whole, kept_back = (
        _trained(1, GDTopK(epoch_steps=EPOCH, ratio=0.01, dense=dense)) for dense in (True, False)
    )
    assert whole[1] < 0.8 * kept_back[1], "0.39 against 0.58"
