"""Auto over processes: all ranks choose alike from what they measure, and skipped steps keep them in step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import offbeat
from offbeat import Auto
from offbeat.core.port import CollectivePort, Usage
from tests.conformance.features import spoilt
from tests.support import loops
from tests.support.limits import HANG_S
from tests.support.scripted_auto import ScriptedAuto

pytestmark = pytest.mark.processes

Tensors = dict[str, torch.Tensor]
STEPS = 12
# Seconds per step of computing, of an exchange, and of waiting, as each rank measures them. Together they are
# C = 1, K = 0.3 and w = 0.3, for which LocalSGD(4) is best. By itself, rank 0 would keep BSP, and rank 1
# would take LocalSGD(8).
SEEN = [(1.0, 4.0, 0.3), (0.1, 0.3, 1.2)]


def _told(rank: int) -> Iterator[Usage]:
    compute_s, exchange_s, wait_s = SEEN[rank]
    return (Usage(n * compute_s, n * exchange_s, 0, wait_s=n * wait_s) for n in count(1))


def _chosen() -> tuple[int, list[str], int, Tensors]:
    rank = dist.get_rank()
    usages = _told(rank)
    model = loops.mlp(rank)
    optimizer = loops.momentum(model)
    with (
        patch.object(CollectivePort, "usage", lambda port: next(usages)),
        offbeat.attach(model, optimizer, Auto(window=2), timeout_s=HANG_S) as sync,
    ):
        loops.train(model, optimizer, loops.batches(rank, STEPS))
        metrics = sync.metrics
        period = sync._session.conductor.state.period
    return period, [text for _, _, _, text in metrics.events], metrics.sync_steps, loops.tensors(model)


def test_all_ranks_choose_alike_though_each_would_choose_otherwise(crew) -> None:
    (period, told, synced, model), (period_there, told_there, synced_there, model_there) = crew(2).run(
        _chosen
    )
    assert period == period_there == 4
    assert synced == synced_there == 5 + 1, "BSP until two windows agreed, and an average after four steps"
    assert loops.equal(model, model_there)
    assert [text.partition(":")[0] for text in told] == ["LocalSGD(period=4) instead of BSP"]
    assert not told_there, "told once"


def _skipping(at: int) -> tuple[Tensors, int, list[str], float]:
    """Rank 1's gradients overflow in one step; return the published model and the period two steps later."""
    rank = dist.get_rank()
    model = loops.mlp(rank)
    optimizer = loops.momentum(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    data = loops.batches(rank, at + 3)
    with offbeat.attach(model, optimizer, ScriptedAuto(), timeout_s=HANG_S) as sync:
        data = spoilt(data, at) if rank == 1 else data
        loops.train(model, optimizer, data, scaler=scaler)
        period = sync._session.conductor.state.period
        told = [text for _, _, _, text in sync.metrics.events]
    return loops.tensors(model), period, told, scaler.get_scale()


@pytest.mark.parametrize("at", [4, 5], ids=["before it is decided", "in the step of the change"])
def test_bsp_does_not_come_back_to_gradients_of_different_scales(crew, at: int) -> None:
    (model, period, told, scale), (there, period_there, _, scale_there) = crew(2).run(_skipping, at)
    assert (scale, scale_there) == (1024.0, 512.0)
    assert period == period_there == 2
    assert "stays: a worker skipped an update" in told[-1]
    assert loops.equal(model, there)
    assert all(torch.isfinite(tensor).all() for tensor in model.values())
