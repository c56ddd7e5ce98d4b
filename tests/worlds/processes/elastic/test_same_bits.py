"""Without failures, elastic training is the training without elastic, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offbeat
from offbeat import BSP, OSP, DiLoCo, ErrorFeedback, LocalSGD, PowerSGD, RandomK, SelSync, TopK
from tests.support import loops
from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes

STRATEGIES = [
    BSP(),
    BSP(codec=ErrorFeedback(TopK(0.1))),
    BSP(codec=ErrorFeedback(PowerSGD(2))),
    LocalSGD(period=3),
    LocalSGD(period=3, codec=RandomK(0.3)),
    SelSync(delta=0.1, window=2, late=True),
    SelSync(aggregate="gradients", window=2),
    DiLoCo(period=4, fragments=2, delay=1, outer_lr=1.0, outer_momentum=0.0, average=0.5),
    OSP(budget=0.5, growth=2),
]


def _with_batch_norm(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5))


def _train(strategy: Any, elastic: bool) -> tuple[Any, int]:
    rank = dist.get_rank()
    model = _with_batch_norm(rank)
    optimizer = loops.momentum(model)
    with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S, elastic=elastic, minimum=2) as sync:
        loops.train(model, optimizer, loops.batches(rank, 9))
        with sync.consensus():
            published = loops.tensors(model)
        return {"own": loops.tensors(model), "published": published}, sync.metrics.bytes_sent


def _twice(strategy: Any) -> bool:
    (plain, plain_sent), (elastic, elastic_sent) = _train(strategy, False), _train(strategy, True)
    assert plain_sent == elastic_sent
    return all(loops.equal(plain[key], elastic[key]) for key in plain)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_elastic_changes_no_bit(crew, strategy: Any) -> None:
    assert crew(3).run(_twice, strategy) == [True] * 3
