"""ServerHalf: what a strategy gets from a server without asking for more than a rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

import offbeat
from offbeat import ASP, BSP, DSSP, GSSP, SSP, Half, LocalSGD, Oscars
from offbeat.experiments.tasks.quadratic import Descent
from offbeat.server.aggregation import Immediate
from offbeat.server.half import ServerHalf, log_caution
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


@pytest.mark.parametrize("strategy", [ASP(), SSP(staleness=0), GSSP(), DSSP()], ids=str)
def test_a_sum_of_adaptive_updates_is_warned_of(strategy: Any, caplog: pytest.LogCaptureFixture) -> None:
    """One such optimizer among several is enough."""
    model = nn.Linear(2, 2)
    log_caution(strategy, [SGD([model.bias], lr=0.1, momentum=0.9), Adam([model.weight])])
    (line,) = caplog.messages
    assert line.startswith(f'{strategy.name} with push="update" and Adam: ')


@pytest.mark.parametrize(
    "strategy", [SSP(push="gradient"), GSSP(push="gradient"), Oscars(), LocalSGD(), BSP()], ids=str
)
def test_other_exchanges_are_not(strategy: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    log_caution(strategy, [Adam(model.parameters())])
    log_caution(SSP(), [SGD(model.parameters(), lr=0.1, momentum=0.9)])
    log_caution(SSP(), [Descent(model, 0.1)])
    assert not caplog.messages


def test_a_state_that_the_server_does_not_get_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    optimizer = Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    log_caution(SSP(push="gradient"), [optimizer])
    (line,) = caplog.messages
    assert line.startswith("under ssp the server steps, and begins without the state")


@pytest.mark.virtual
def test_a_run_warns_once_for_all_workers(caplog: pytest.LogCaptureFixture) -> None:
    offbeat.simulate(
        model=nn.Linear(3, 1),
        loss=lambda model, batch: model(batch[0]).pow(2).mean(),
        data=(torch.ones(8, 3),),
        optimizer=Adam,
        strategy=SSP(push="update"),
        workers=2,
        batch_size=2,
        steps=1,
    )
    assert len(caplog.messages) == 1
