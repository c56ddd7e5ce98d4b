"""What trains is what was attached: parameters and optimizers that come later are refused, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

import offbeat
from offbeat import OffbeatError
from tests.support import loops

pytestmark = pytest.mark.processes

Change = Callable[[Any, Optimizer], Optimizer]


def _step(model: nn.Module, optimizer: Optimizer) -> None:
    loops.train(model, optimizer, loops.batches(0, 1))


def _added_group(model: Any, optimizer: Optimizer) -> Optimizer:
    model.append(nn.Linear(5, 5))
    optimizer.add_param_group({"params": model[-1].parameters()})
    return optimizer


def _replaced_layer(model: Any, optimizer: Optimizer) -> Optimizer:
    model[4] = nn.Linear(32, 5)
    optimizer.param_groups[0]["params"][-2:] = model[4].parameters()
    return optimizer


def _assigned_state(model: Any, optimizer: Optimizer) -> Optimizer:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    return optimizer


def _new_optimizer(model: Any, optimizer: Optimizer) -> Optimizer:
    return SGD(model.parameters(), lr=0.01)


def _told(change: Change) -> str:
    model = loops.mlp()
    optimizer = loops.sgd(model)
    with pytest.raises(OffbeatError) as told, offbeat.attach(model, optimizer, offbeat.BSP()):
        _step(model, optimizer)
        _step(model, change(model, optimizer))
    return str(told.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_added_group, "the parameters of SGD are not those"),
        (_replaced_layer, "the parameters of SGD are not those"),
        (_assigned_state, "parameter 0.weight came into the model"),
        (_new_optimizer, "a SGD that is not attached steps parameter 0.weight"),
    ],
)
def test_what_came_later_is_refused_at_its_first_step(crew, change: Change, words: str) -> None:
    (told,) = crew(1).run(_told, change)
    assert words in told and "close() and attach again" in told


def _parametrized() -> list[str]:
    model = loops.mlp()
    sync = offbeat.attach(model, loops.sgd(model), offbeat.BSP())
    nn.utils.parametrizations.weight_norm(model[2])
    with pytest.raises(OffbeatError) as inside, sync.consensus():
        pass
    with pytest.raises(OffbeatError) as closed:
        sync.close()
    return [str(inside.value), str(closed.value)]


def test_a_parameter_that_came_later_is_found_in_consensus_and_at_the_end(crew) -> None:
    for told in crew(1).run(_parametrized)[0]:
        assert "parameter 2.parametrizations.weight.original0 came into" in told


class Facade(SGD):
    """An optimizer that steps by another one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        SGD(self.param_groups[0]["params"], lr=0.1).step()


def _others() -> bool:
    """Step an optimizer inside an attached one, one of another model, and one of this model after close()."""
    model, other = loops.mlp(), loops.mlp()
    optimizer = Facade(model.parameters(), lr=0.1)
    with offbeat.attach(model, optimizer, offbeat.BSP()):
        _step(model, optimizer)
        _step(other, loops.sgd(other))
        same = loops.equal(loops.tensors(model), loops.tensors(other))
    _step(model, loops.sgd(model))
    return same


def test_others_train_on(crew) -> None:
    assert crew(1).run(_others) == [True]


def _tied() -> None:
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20), nn.Linear(20, 5))
    optimizer = loops.sgd(model)
    with offbeat.attach(model, optimizer, offbeat.BSP()) as sync:
        model[1].weight = model[0].weight
        _step(model, optimizer)
        with sync.consensus():
            pass


def test_tied_parameters_are_no_new_ones(crew) -> None:
    crew(1).run(_tied)
