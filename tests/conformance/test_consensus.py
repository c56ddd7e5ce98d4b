"""In a consensus all ranks hold the same model; before and after, each its own; once closed, that model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offbeat
from tests.conformance.features import batch_norm, spoilt
from tests.conformance.table import AnyStrategy, Case, every_case, every_repeating_case, every_strategy
from tests.support import loops
from tests.support.limits import HANG_S

STEPS = 11
Tensors = dict[str, torch.Tensor]


def _looks(strategy: AnyStrategy, buffers: str) -> dict[str, Tensors]:
    rank = dist.get_rank()
    model = batch_norm(rank)
    optimizer = loops.momentum(model)
    with offbeat.attach(model, optimizer, strategy, buffers=buffers, timeout_s=HANG_S) as sync:
        loops.train(model, optimizer, loops.batches(rank, STEPS), samples=sync.samples)
        sync.settle()  # close() waits, too: a look alone does not
        seen = {"before": loops.tensors(model)}
        with sync.consensus():
            seen["inside"] = loops.tensors(model)
        seen["after"] = loops.tensors(model)
    seen["closed"] = loops.tensors(model)
    return seen


@every_strategy
def test_all_hold_the_same_inside_and_their_own_after(crew, strategy: AnyStrategy) -> None:
    for buffers in ("average", "broadcast", "local"):
        one, other = crew(2).run(_looks, strategy, buffers)
        assert loops.equal(one["inside"], other["inside"])
        for mine in (one, other):
            assert loops.equal(mine["before"], mine["after"])
            assert loops.equal(mine["inside"], mine["closed"])
        own = {name for name in one["before"] if not torch.equal(one["before"][name], other["before"][name])}
        assert strategy.identical_replicas == (not own & dict(batch_norm(0).named_parameters()).keys())


def _trajectory(strategy: AnyStrategy, every: int | None) -> Tensors:
    """Evaluate in a consensus every so many steps, in eval mode, as users do."""
    rank = dist.get_rank()
    model = batch_norm(rank)
    optimizer = loops.momentum(model)
    with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S) as sync:

        def look(step: int) -> None:
            if every and step % every == 0:
                with sync.consensus(), torch.no_grad():
                    model.eval()
                    model(torch.ones(1, 20))
                    model.train()

        loops.train(model, optimizer, loops.batches(rank, STEPS), samples=sync.samples, after_step=look)
    return loops.tensors(model)


@every_repeating_case
def test_looking_does_not_change_the_training(crew, case: Case) -> None:
    without = crew(2).run(_trajectory, case.strategy, None)
    looking = crew(2).run(_trajectory, case.strategy, 3)
    for one, other in zip(without, looking, strict=True):
        assert case.same(one, other)


def _skipping(strategy: AnyStrategy, steps: int) -> tuple[Tensors, Tensors, Any]:
    """The scaler skips the last step on one rank; then look twice."""
    rank = dist.get_rank()
    model = loops.mlp(rank)
    optimizer = loops.momentum(model)
    data = loops.batches(rank, steps)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S) as sync:
        if rank == 1:
            data = spoilt(data, steps - 1)
        loops.train(model, optimizer, data, samples=sync.samples, scaler=scaler)
        looks = []
        with sync.consensus():  # finishes the step
            pass
        sync.settle()
        for _ in range(2):
            with sync.consensus():
                looks.append(loops.tensors(model))
        return looks[0], looks[1], sync.metrics


@every_case
@pytest.mark.parametrize("steps", [3, 4])
def test_a_skipped_step_that_a_consensus_finishes_stays_finished(crew, case: Case, steps: int) -> None:
    """With the average that it may end with: restoring a rank's own weights must not take that back."""
    (first, second, metrics), (_, _, metrics_there) = crew(2).run(_skipping, case.strategy, steps)
    assert loops.equal(first, second)
    assert metrics.steps == metrics_there.steps == steps
    assert metrics.sync_steps == metrics_there.sync_steps
    sent = metrics.bytes_sent, metrics_there.bytes_sent
    if case.sent_by_rank is None or case.strategy.server_half() is not None:
        assert sent[0] == sent[1]
    else:
        counts = [case.sent_by_rank(loops.mlp(0), steps, 2, rank, "momentum") for rank in range(2)]
        assert sent == tuple(counts)


def _mean(strategy: AnyStrategy) -> tuple[torch.Tensor, torch.Tensor]:
    rank = dist.get_rank()
    model = nn.Linear(20, 5)
    optimizer = loops.sgd(model)
    with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S) as sync:
        loops.train(model, optimizer, loops.batches(rank, 2), samples=sync.samples)
        own = loops.flat(model)
        with sync.consensus():
            return own, loops.flat(model)


def test_local_weights_are_averaged_for_it(crew) -> None:
    results = crew(2).run(_mean, offbeat.LocalSGD(period=100))
    (one, agreed), (other, _) = results
    assert not torch.equal(one, other)
    assert torch.equal(agreed, one * 0.5 + other * 0.5)


SERVED = [
    offbeat.ASP(),
    offbeat.SSP(staleness=1),
    offbeat.SSP(staleness=1, push="gradient"),
    offbeat.DSSP(low=1, high=2),
    offbeat.GSSP(groups="0/1"),
    offbeat.Oscars(tau=2, patience=1e6),
]


def _unequal(strategy: AnyStrategy) -> tuple[Tensors, Tensors]:
    """Rank 0 ends its loop first; what it holds when it leaves, and once closed."""
    rank = dist.get_rank()
    model = batch_norm(rank)
    optimizer = loops.momentum(model)
    with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S) as sync:
        data = loops.batches(rank, 7 if rank else 3)
        loops.train(model, optimizer, data, samples=sync.samples)
        own = loops.tensors(model)
    return own, loops.tensors(model)


@pytest.mark.parametrize("strategy", SERVED, ids=str)
def test_ranks_of_a_server_may_end_at_different_times_and_hold_one_model(crew, strategy: AnyStrategy) -> None:
    (own, closed), (_, closed_there) = crew(2).run(_unequal, strategy)
    assert loops.equal(closed, closed_there)
    assert not loops.equal(own, closed)  # rank 1 has trained on
