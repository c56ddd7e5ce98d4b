"""OptimizerSpec: the user's optimizer as data, cut to a shard; which optimizers are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

import offbeat
from offbeat.core.replica import Replica
from offbeat.server.optimizer_spec import OptimizerSpec, spec_of


class Whole(SGD):
    """Known to nobody."""


def test_an_optimizer_that_cannot_be_cut_is_refused_with_what_to_do() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(offbeat.SettingError, match=r'cannot run a Whole.*push="update" any'):
        spec_of(Replica(model, optimizer=Whole(model.parameters(), lr=0.1)))


def _spec() -> OptimizerSpec:
    """Of one flat tensor with three parameters of 16 entries each, the middle one in a group of its own."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(16)) for _ in range(3)])
    groups = [{"params": [model[0], model[2]], "lr": 0.1}, {"params": [model[1]], "lr": 0.2, "momentum": 0.5}]
    return spec_of(Replica(model, optimizer=SGD(groups)))


def test_the_pieces_are_the_parameters_in_backward_order_with_their_groups() -> None:
    spec = _spec()
    assert spec.kinds == ["SGD", "SGD"]
    assert [(group["lr"], group["momentum"]) for group in spec.groups] == [(0.1, 0), (0.2, 0.5)]
    assert spec.pieces == [(0, 0, 0, 16, 0), (1, 0, 16, 32, 1), (0, 0, 32, 48, 2)]
    assert spec.marks == 3
    assert OptimizerSpec(**json.loads(json.dumps(asdict(spec)))).state_names() == spec.state_names()


def test_a_shard_has_its_part_of_each_parameter_counted_from_its_own_start() -> None:
    shard = _spec().for_shard([(10, 32)])
    assert shard.pieces == [(0, 0, 0, 6, 0), (1, 0, 6, 22, 1)]
    assert (shard.kinds, shard.marks) == (["SGD", "SGD"], 3)
    assert _spec().for_shard([(0, 48)]) == _spec()
    assert _spec().for_shard([(20, 20)]).pieces == []


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda params: SGD(params, lr=0.1), {}),
        (lambda params: SGD(params, lr=0.1, momentum=0.9), {"momentum_buffer": True}),
        (lambda params: Adam(params), {"exp_avg": True, "exp_avg_sq": True, "step": False}),
    ],
    ids=["sgd", "momentum", "adam"],
)
def test_the_state_is_named_with_whether_it_has_a_value_per_element(
    make: Callable[[Any], Optimizer], names: dict[str, bool]
) -> None:
    model = nn.Linear(3, 2)
    assert spec_of(Replica(model, optimizer=make(model.parameters()))).state_names() == names


def test_a_learning_rate_in_a_tensor_becomes_a_number() -> None:
    model = nn.Linear(3, 2)
    spec = spec_of(Replica(model, optimizer=Adam(model.parameters(), lr=torch.tensor(0.25))))
    assert spec.groups[0]["lr"] == 0.25 and isinstance(spec.groups[0]["lr"], float)
