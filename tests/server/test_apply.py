"""Where the server has the optimizer: shares stepped apart become what the whole would have become."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import offbeat
from offbeat.core.blocks import Layout
from offbeat.core.gradients import copy_gradients, gradient_marks
from offbeat.core.replica import Replica
from offbeat.server.apply import ServerOptimizer
from offbeat.server.messages import Push
from offbeat.server.optimizer_spec import OptimizerSpec, spec_of
from offbeat.server.sharding import shard_bounds, split_shards
from tests.conformance.features import mixed_dtypes


def _grouped(model: nn.Module) -> Optimizer:
    params = list(model.parameters())
    groups = [{"params": params[::2], "lr": 0.1}, {"params": params[1::2], "lr": 0.02, "weight_decay": 0.1}]
    return SGD(groups, momentum=0.9, nesterov=True)


OPTIMIZERS = {
    "sgd": lambda m: SGD(m.parameters(), lr=0.1),
    "groups": _grouped,
    "adam": lambda m: Adam(m.parameters(), lr=0.01, betas=(0.8, 0.9)),
}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_shares_stepped_apart_are_the_whole_stepped_at_once(make, shards: int) -> None:
    torch.manual_seed(0)
    plain = mixed_dtypes(0)
    model = copy.deepcopy(plain)
    optimizer = make(plain)
    replica = Replica(model, optimizer=make(model), layout=Layout(1, 64))
    plan = OptimizerSpec(**json.loads(json.dumps(asdict(spec_of(replica)))))  # as it would travel
    parts = split_shards(replica.weights, shards)
    folds = [
        ServerOptimizer(
            plan.for_shard(shard_bounds([w.numel() for w in replica.weights], k, shards)), parts[k]
        )
        for k in range(shards)
    ]
    flats = [torch.empty_like(weight) for weight in replica.weights]
    with torch.no_grad():
        for clock in range(1, 4):
            for one, other in zip(plain.parameters(), model.parameters(), strict=True):
                one.grad = torch.randn_like(one)
                other.grad = one.grad.clone()
            for group, own in zip(optimizer.param_groups, replica.optimizer.groups, strict=True):
                group["lr"] = own["lr"] = group["lr"] * 0.5  # a schedule
            copy_gradients(replica, flats)
            optimizer.step()
            for fold, part, gradient in zip(folds, parts, split_shards(flats, shards), strict=True):
                figures = (*replica.optimizer.learning_rates, *gradient_marks(replica))
                fold(part, Push(worker=0, clock=clock, update=gradient, report=figures))
            for one, other in zip(plain.parameters(), model.parameters(), strict=True):
                assert torch.equal(one, other)


def test_nothing_else_can_be_pushed() -> None:
    with pytest.raises(offbeat.SettingError, match="push='weights': choose one of auto, update, gradient"):
        offbeat.SSP(push="weights")


def test_a_gradient_that_is_absent_counts_as_zero() -> None:
    model = nn.Linear(3, 2)
    replica = Replica(model, optimizer=SGD(model.parameters(), lr=0.1))
    model.weight.grad = torch.ones_like(model.weight)
    flat: list[Tensor] = [torch.full_like(weight, 7.0) for weight in replica.weights]
    copy_gradients(replica, flat)
    assert sorted(set(flat[0].tolist())) in ([0.0, 1.0], [0.0, 1.0, 7.0])  # 7: padding that is nobody's
    (block,) = replica.blocks
    views = dict(zip(block.names, block.views(flat[0]), strict=True))
    assert (views["weight"] == 1).all() and (views["bias"] == 0).all()
