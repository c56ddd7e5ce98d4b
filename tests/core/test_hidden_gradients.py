"""Gradients that are hidden for a part of a step come back, whatever was computed meanwhile."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from offbeat.core.hidden_gradients import HiddenGradients


def _params(*grads: float | None) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.zeros(2)) for _ in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else torch.full((2,), grad)
    return params


def _values(params: list[nn.Parameter]) -> list[float | None]:
    return [None if p.grad is None else float(p.grad[0]) for p in params]


def _backward(param: nn.Parameter, grad: float) -> None:
    """Do as autograd does: add to a gradient in place, or make one."""
    param.grad = torch.full((2,), grad) if param.grad is None else param.grad.add_(grad)


def test_nobody_sees_them_until_they_are_shown() -> None:
    params = _params(1.0, None)
    hidden = HiddenGradients(params)
    assert _values(params) == [None, None]
    hidden.show()
    assert _values(params) == [1.0, None]


def test_the_next_steps_gradients_are_not_replaced() -> None:
    params = _params(1.0, 2.0)
    hidden = HiddenGradients(params)
    _backward(params[0], 5.0)
    hidden.show()
    assert _values(params) == [5.0, 2.0]


def test_a_backward_that_adds_finds_the_sum() -> None:
    """The first parameter was reached before they were shown, the others are after it."""
    params = _params(1.0, 2.0, None, None)
    memory: list[Tensor | None] = [param.grad for param in params]
    hidden = HiddenGradients(params)
    _backward(params[0], 10.0)
    _backward(params[2], 30.0)
    hidden.show_for_accumulation()
    _backward(params[1], 20.0)
    assert _values(params) == [11.0, 22.0, 30.0, None]
    assert params[0].grad is memory[0]  # in the place where a block finds it
    assert params[1].grad is memory[1]
