"""Every strategy works with what loops and models out there do; BSP does exactly what DDP does with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import offbeat
from tests.conformance import features
from tests.conformance.features import FEATURES, every_feature
from tests.conformance.hand_counts import RankCount
from tests.conformance.table import (
    COUNTED,
    AnyStrategy,
    Case,
    every_case,
    every_counted_case,
    every_strategy,
)
from tests.support import loops
from tests.support.limits import HANG_S

STEPS = 8
Tensors = dict[str, torch.Tensor]
_metrics: dict[tuple[str, AnyStrategy], list[Any]] = {}  # by rank, of the runs so far


COUNTED_FEATURES = ["momentum", "batch norm", "frozen", "tied", "mixed dtypes", "accumulation"]


def _trained(feature: str, strategy: AnyStrategy, every_rank_a_host: bool) -> tuple[Any, Tensors]:
    with pytest.MonkeyPatch.context() as patch:
        if every_rank_a_host:
            patch.setenv("LOCAL_RANK", "0")
        _, metrics, agreed = features.attached(feature, strategy, dist.get_rank(), STEPS)
    return metrics, agreed


def _run_of_two(crew: Any, feature: str, strategy: AnyStrategy) -> list[tuple[Any, Tensors]]:
    counted = feature in COUNTED_FEATURES and any(case.strategy == strategy for case, _ in COUNTED)
    results: list[tuple[Any, Tensors]] = crew(2).run(_trained, feature, strategy, counted)
    _metrics[feature, strategy] = [metrics for metrics, _ in results]
    return results


def _check_alike(strategy: AnyStrategy, one: Any, other: Any) -> None:
    assert one.sync_steps == other.sync_steps
    # Groups of different speed send unequally much; of what is in flight at the end, one half has been sent.
    if getattr(strategy, "sparse", None) is None and not getattr(strategy, "eager", False):
        assert one.bytes_sent == other.bytes_sent


@every_strategy
@every_feature
def test_ranks_keep_step_and_agree(crew, feature: str, strategy: AnyStrategy) -> None:
    (one, agreed), (other, agreed_there) = _run_of_two(crew, feature, strategy)
    assert loops.equal(agreed, agreed_there)
    assert all(torch.isfinite(tensor).all() for tensor in agreed.values())
    assert one.steps == other.steps == STEPS
    _check_alike(strategy, one, other)
    start = FEATURES[feature].model(0)
    for name, param in start.named_parameters():
        idle = not param.requires_grad or (feature == "unused" and name.startswith("spare"))
        assert torch.equal(agreed[name], param) == idle


@every_counted_case
@pytest.mark.parametrize("feature", COUNTED_FEATURES)
def test_bytes_equal_hand_count(crew, case: Case, sent: RankCount, feature: str) -> None:
    """Of the runs above; test_bytes.py has others."""
    if (feature, case.strategy) not in _metrics:
        _run_of_two(crew, feature, case.strategy)
    model = FEATURES[feature].model(0)
    for rank, metrics in enumerate(_metrics[feature, case.strategy]):
        assert metrics.bytes_left_host == sent(model, STEPS, 2, rank, FEATURES[feature].optimizer)
        assert metrics.steps == STEPS
        assert metrics.sync_steps + metrics.local_steps == STEPS


def _both(feature: str) -> tuple[torch.Tensor, torch.Tensor]:
    rank = dist.get_rank()
    reference = FEATURES[feature].model(0)
    # statistics are no part of the comparison: DDP takes rank 0's, and training never reads them
    ddp = DistributedDataParallel(
        reference, find_unused_parameters="used" in feature, broadcast_buffers=False
    )
    features.loop(feature, reference, ddp, rank, STEPS, no_sync=ddp.no_sync)
    ours, _, _ = features.attached(feature, offbeat.BSP(), rank, STEPS)
    return loops.flat(reference.double()), loops.flat(ours.double())


@every_feature
def test_bsp_equals_ddp(crew, feature: str) -> None:
    for ddp, ours in crew(2).run(_both, feature):
        assert torch.equal(ddp, ours)


def _overflowing(strategy: AnyStrategy, at: int) -> tuple[Any, Tensors, int, float]:
    """Rank 1's gradients overflow in one step."""
    rank = dist.get_rank()
    model = loops.mlp(rank)
    optimizer = loops.momentum(model)
    updates = []
    optimizer.register_step_post_hook(lambda *_: updates.append(1))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    data = loops.batches(rank, STEPS)
    with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S) as sync:
        spoilt = features.spoilt(data, at) if rank == 1 else data
        loops.train(model, optimizer, spoilt, scaler=scaler, samples=sync.samples)
        sync.settle()
        with sync.consensus():
            agreed = loops.tensors(model)
        return sync.metrics, agreed, len(updates), scaler.get_scale()


@every_case
@pytest.mark.parametrize("at", [2, 3, 4, STEPS - 1])
def test_a_step_that_the_scaler_skips_on_one_rank(crew, case: Case, at: int) -> None:
    results = crew(2).run(_overflowing, case.strategy, at)
    (one, agreed, updates, scale), (other, agreed_there, updates_there, scale_there) = results
    assert loops.equal(agreed, agreed_there)
    assert all(torch.isfinite(tensor).all() for tensor in agreed.values())
    assert one.steps == other.steps == STEPS
    _check_alike(case.strategy, one, other)
    assert (updates_there, scale_there) == (STEPS - 1, 512.0)
    travels = case.gradients_travel
    skipped_too = travels if isinstance(travels, bool) else at in travels
    assert (updates, scale) == ((STEPS - 1, 512.0) if skipped_too else (STEPS, 1024.0))
