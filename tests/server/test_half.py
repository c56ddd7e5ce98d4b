"""ServerHalf: what a strategy gets from a server without asking for more than a rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offbeat import ASP, GSSP, SSP, Half
from offbeat.server.aggregation import Immediate
from offbeat.server.half import ServerHalf
from offbeat.server.messages import Join, Push, PushAck
from offbeat.server.rule import Unbounded
from offbeat.server.server import ParameterServer
from offbeat.server.sharding import ShardState


def test_a_rule_is_enough_and_pushes_are_then_added_at_once_as_they_are() -> None:
    half = ServerHalf(rule=Unbounded())
    assert half.aggregation is Immediate
    assert (half.push_codecs, half.pull_codec, half.owns_optimizer) == ((), None, False)
    server = ParameterServer(ShardState([torch.zeros(2)]), half)
    server.handle(Join(worker=0))
    answers = server.handle(Push(worker=0, clock=1, update=[torch.tensor([1.0, 2.0])]))
    assert answers == [PushAck(worker=0, clock=1)]
    assert server.weights[0].tolist() == [1.0, 2.0]


def test_a_rule_is_needed() -> None:
    with pytest.raises(TypeError, match="rule"):
        ServerHalf()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("strategy", "codecs", "owns_optimizer"),
    [
        (ASP(), (), False),
        (SSP(codec=Half()), (Half(),), False),
        (SSP(push="gradient"), (), True),
        (GSSP(), (), False),
    ],
    ids=str,
)
def test_strategies_declare_their_codecs_and_who_has_the_optimizer(
    strategy: Any, codecs: tuple[Any, ...], owns_optimizer: bool
) -> None:
    half = strategy.server_half()
    assert half.push_codecs == codecs
    assert half.owns_optimizer is owns_optimizer
    assert type(half.rule) is type(strategy.rule())
