"""State forms: what the user's optimizer keeps of a parameter, as data that can be sent and given back.

    tensors   as long as the parameter, and cut with it (momentum, Adam's moments); or, where parameters stay
              whole, of any shape (Adafactor's rows and columns)
    numbers   one per parameter: step counters, as tensors or as Python's own numbers

All workers must know the form of a state that perhaps only an owner has. A parameter that was never stepped
here is tried out: zeros make a step with a gradient of zeros. What is neither tensor nor number is refused.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offbeat.core.optimizer import OptimizerState, OptimizerView
from offbeat.errors import SettingError

State = dict[str, Any]


class TensorForm(NamedTuple):
    """The form of one tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    cut: bool  # with the parameter

    def zeros(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).zero_()


class StateForm(NamedTuple):
    """The names of a parameter's state; each number with its first value."""

    tensors: dict[str, TensorForm]
    numbers: dict[str, Any]

    def check(self, state: State) -> None:
        """Refuse a state that has another form by now."""
        found, known = _names(state), sorted([*self.tensors, *self.numbers])
        if found != known:
            raise SettingError(
                f"ssd_sgd sends the optimizer's state. It was {known or 'empty'}, and is {found} now: an "
                "optimizer, and its settings, must not change what it keeps while it trains"
            )


def form_of(optimizer: OptimizerView, param: nn.Parameter) -> StateForm:
    """Return the form of a parameter's state: as it is here, or as a trial step makes it."""
    tensors, numbers = {}, {}
    for name, value in (optimizer.state_of(param) or _try_step(optimizer, param)).items():
        if isinstance(value, Tensor) and (value.shape == param.shape or value.numel() > 1):
            cut = value.shape == param.shape
            stride = param.stride() if cut else torch.empty(value.shape, device="meta").stride()
            tensors[name] = TensorForm(value.shape, stride, value.dtype, value.device, cut)
        elif isinstance(value, Tensor | bool | int | float):
            numbers[name] = value.clone() if isinstance(value, Tensor) else value
        elif value is not None:
            raise SettingError(
                f"ssd_sgd sends the optimizer's state, but state[param]['{name}'] is a "
                f"{type(value).__name__}: only tensors and numbers can be sent. BSP, LocalSGD, SelSync and "
                "DiLoCo work with any optimizer"
            )
    return StateForm(tensors, numbers)


def _try_step(optimizer: OptimizerView, param: nn.Parameter) -> State:
    trial = torch.zeros_like(param, requires_grad=False)
    trial.grad = torch.zeros_like(trial)
    state: OptimizerState = defaultdict(dict)
    members: list[list[Tensor]] = [
        [trial] if any(each is param for each in group["params"]) else [] for group in optimizer.groups
    ]
    optimizer.step_tensors(members, optimizer.learning_rates, state)
    return state[trial]


def as_laid_out(state: State, name: str, param: Tensor) -> Tensor:
    """Return a tensor of a state; where it lies in memory unlike its parameter, lay it out anew."""
    value: Tensor = state[name]
    if value.shape == param.shape and value.stride() != param.stride():
        value = torch.empty_like(param, dtype=value.dtype, device=value.device).copy_(value)
        state[name] = value
    return value


def set_number(state: State, name: str, example: Any, value: Any) -> None:
    """Set a number of a state, as the optimizer keeps it: in its own tensor, or as a Python number."""
    if not isinstance(example, Tensor):
        state[name] = type(example)(value)
    elif name in state:
        state[name].copy_(value) if isinstance(value, Tensor) else state[name].fill_(value)
    else:
        state[name] = example.clone().copy_(torch.as_tensor(value))


def _names(state: State) -> list[str]:
    return sorted(name for name, value in state.items() if value is not None)
