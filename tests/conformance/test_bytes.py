"""Bytes at the port equal a hand count, made from the model's shapes; so do those that leave the host.

Of two ranks and other models, in test_features.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from offbeat import BSP, SSDSGD, SSP, DiLoCo, LocalSGD
from tests.conformance import features
from tests.conformance.features import FEATURES
from tests.conformance.hand_counts import RankCount, weights
from tests.conformance.table import AnyStrategy, Case, every_counted_case
from tests.support import loops

STEPS = 10


def _metrics(feature: str, strategy: AnyStrategy) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")  # every rank a host
        return features.attached(feature, strategy, dist.get_rank(), STEPS)[1]


@every_counted_case
def test_bytes_of_four(crew, case: Case, sent: RankCount) -> None:
    model = FEATURES["batch norm"].model(0)
    for rank, metrics in enumerate(crew(4).run(_metrics, "batch norm", case.strategy)):
        assert metrics.bytes_left_host == sent(model, STEPS, 4, rank, "momentum")


def _wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 1200), nn.ReLU(), nn.Linear(1200, 700), nn.ReLU(), nn.Linear(700, 5))


def _metrics_of_wide(strategy: AnyStrategy, every_rank_a_host: bool = True) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if every_rank_a_host:
            patch.setenv("LOCAL_RANK", "0")
        return loops.attached(dist.get_rank(), strategy, "momentum", 3, model=lambda _: _wide())[1]


@every_counted_case
def test_bytes_of_several_blocks(crew, case: Case, sent: RankCount) -> None:
    """3.4 MB of weights: more than one block."""
    for rank, metrics in enumerate(crew(2).run(_metrics_of_wide, case.strategy)):
        assert metrics.bytes_left_host == sent(_wide(), 3, 2, rank, "momentum")


def _metrics_on_one_host(strategy: AnyStrategy) -> Any:
    return loops.attached(dist.get_rank(), strategy, "sgd", STEPS, model=lambda _: _wide())[1]


@pytest.mark.parametrize("strategy", [SSP(staleness=1), SSDSGD(on="server", warmup=STEPS)], ids=str)
def test_bytes_of_a_server_on_the_same_host(crew, strategy: AnyStrategy) -> None:
    """Every step pushes the model and pulls it; nothing leaves the host."""
    for metrics in crew(2).run(_metrics_on_one_host, strategy):
        assert (metrics.bytes_sent, metrics.bytes_left_host) == (STEPS * 2 * weights(_wide()), 0)


@pytest.mark.parametrize("strategy", [BSP(), LocalSGD(period=2), SSDSGD(warmup=2), DiLoCo(period=2)], ids=str)
def test_bytes_of_collectives_on_one_host(crew, strategy: AnyStrategy) -> None:
    """As many bytes are sent as between hosts, and none of them leaves the host."""
    between = crew(2).run(_metrics_of_wide, strategy)
    for there, here in zip(between, crew(2).run(_metrics_of_wide, strategy, False), strict=True):
        assert there.bytes_left_host == there.bytes_sent == here.bytes_sent > 0
        assert here.bytes_left_host == 0
