"""Auto over processes changes by what it measures itself, where the link leaves no doubt."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import offbeat
from offbeat import Auto
from tests.support import loops
from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes

RANKS, STEPS = 4, 8
SLOW = "1mbit"


def _chosen(bandwidth: str) -> tuple[int, int, list[str], dict[str, torch.Tensor]]:
    rank = dist.get_rank()
    model = loops.mlp(rank)
    optimizer = loops.momentum(model)
    auto = Auto(window=2, longest=2)  # BSP, or LocalSGD(2), which halves what is waited for
    with offbeat.attach(model, optimizer, auto, timeout_s=HANG_S, bandwidth=bandwidth) as sync:
        loops.train(model, optimizer, loops.batches(rank, STEPS))
        metrics = sync.metrics
        period = sync._session.conductor.state.period
    told = [text.partition(":")[0] for _, _, _, text in metrics.events]
    return period, metrics.sync_steps, told, loops.tensors(model)


def test_it_leaves_bsp_on_a_slow_link_by_its_own_measurements(crew) -> None:
    """An exchange takes some 0.2 s: LocalSGD(2) pays unless computing takes four times as long."""
    results = crew(RANKS).run(_chosen, SLOW)
    periods, synced, told, models = zip(*results, strict=True)
    assert set(periods) == {2}
    assert told == (["LocalSGD(period=2) instead of BSP"], [], [], [])
    assert all(loops.equal(models[0], model) for model in models[1:])
    assert len(set(synced)) == 1 and synced[0] < STEPS
