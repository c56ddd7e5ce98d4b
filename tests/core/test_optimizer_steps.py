"""Which optimizers a step waits for, and gradients that change between two of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from offbeat.core.optimizer_steps import OptimizerSteps, has_gradients, with_gradients
from offbeat.errors import OffbeatError


def _pair(*with_grad: int) -> list[Optimizer]:
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    for index in with_grad:
        params[index].grad = torch.ones(2)
    return [SGD([param], lr=0.1) for param in params]


def test_a_step_ends_with_the_last_optimizer_that_has_gradients() -> None:
    first, second = _pair(0, 1)
    steps = OptimizerSteps([first, second])
    steps.begin()
    steps.expect()
    assert not steps.any_stepped
    steps.record(second)
    assert steps.any_stepped
    assert not steps.all_stepped
    steps.record(first)
    assert steps.all_stepped


def test_an_optimizer_without_gradients_is_not_waited_for() -> None:
    first, second = _pair(0)
    steps = OptimizerSteps([first, second])
    steps.begin()
    steps.expect()
    steps.record(first)
    assert steps.all_stepped
    assert has_gradients(first)
    assert not has_gradients(second)
    assert [param is first.param_groups[0]["params"][0] for param in with_gradients(first)] == [True]


def test_gradients_that_come_later_are_expected_too() -> None:
    """As where a parameter has a gradient on another worker only."""
    first, second = _pair(0)
    steps = OptimizerSteps([first, second])
    steps.begin()
    steps.expect()
    second.param_groups[0]["params"][0].grad = torch.ones(2)
    steps.expect()
    steps.record(first)
    assert not steps.all_stepped


def test_gradients_that_are_cleared_in_between_stay_expected() -> None:
    first, second = _pair(0, 1)
    steps = OptimizerSteps([first, second])
    steps.begin()
    steps.expect()
    second.zero_grad()
    steps.expect()
    steps.record(first)
    assert not steps.all_stepped


def test_optimizers_that_stepped_inside_backward_have_stepped() -> None:
    first, second = _pair(1)
    steps = OptimizerSteps([first, second])
    steps.begin([first])
    steps.expect()
    assert steps.any_stepped
    assert not steps.all_stepped
    steps.record(second)
    assert steps.all_stepped
    steps.begin()
    assert not steps.any_stepped


def _clip(optimizer: Optimizer) -> None:
    for param in with_gradients(optimizer):
        assert param.grad is not None
        param.grad.mul_(0.5)


def test_gradients_that_change_after_the_first_step_are_refused() -> None:
    first, second = _pair(0, 1)
    steps = OptimizerSteps([first, second])
    steps.begin()
    steps.check_unchanged(first)
    steps.check_unchanged(second)  # they have not
    _clip(second)
    with pytest.raises(OffbeatError, match=r"\(SGD\) changed after the first had stepped.*unscale and clip"):
        steps.check_unchanged(second)
    steps.begin()
    steps.check_unchanged(second)  # of the next step
