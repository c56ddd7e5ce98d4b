"""Places of an optimizer's state: a strategy that steps parts or copies must know all of it.

torch's own optimizers keep their state in `optimizer.state[param]`, each parameter's by itself. Others keep
some elsewhere: Prodigy and schedule-free optimizers count steps in their groups, some have attributes, a
facade has optimizers inside. To step a part of the parameters later than the rest, or to predict a step,
would then change numbers that belong to the whole step. No attribute says where state lies, so the user's own
first step is watched: what changes in it besides `optimizer.state` is state that cannot be set apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from offbeat.errors import SettingError

# These step each element independently of all others: a parameter may be cut, and its pieces stepped apart.
_CLASSES = (SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, Rprop, ASGD)
ELEMENTWISE: dict[str, Any] = {cls.__name__: cls for cls in _CLASSES}
SEPARABLE: tuple[Any, ...] = (*_CLASSES, Adafactor)  # all their state is in `optimizer.state[param]`
_TORCHS = ("state", "param_groups", "defaults", "grad_scale", "found_inf", "_step_count", "_opt_called")


class StateWatch:
    """A look at optimizers of unknown classes in their first step, for state outside `state[param]`."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = [each for each in optimizers if type(each) not in SEPARABLE]
        self._before: dict[int, dict[str, Any]] = {}
        self._found: dict[int, str] = {}  # by optimizer: a place where it keeps state of its own
        self._watched: set[int] = set()  # optimizers that have been watched in a step

    def on_step_start(self, optimizer: Optimizer) -> None:
        """Note an optimizer's groups and attributes, just before it steps for the first time."""
        if optimizer in self._optimizers and id(optimizer) not in self._watched:
            self._before[id(optimizer)] = _outside_state(optimizer)

    def on_step_end(self, optimizer: Optimizer) -> None:
        """Compare them with what the step left."""
        before = self._before.pop(id(optimizer), None)
        if before is None:
            return
        after = _outside_state(optimizer)
        changed = [name for name in after if name not in before or not _equal(before[name], after[name])]
        if changed:
            self._found[id(optimizer)] = changed[0]
        self._watched.add(id(optimizer))

    def check(self, strategy: str) -> None:
        """Refuse an optimizer that is known by now to keep state outside `state[param]`."""
        optimizer, why = self.reason()
        if optimizer is not None:
            raise _refusal(strategy, optimizer, why)

    def reason(self) -> tuple[Optimizer | None, str]:
        """Return the first optimizer that keeps state outside `state[param]`, if any, and where."""
        reasons = ((optimizer, self._reason(optimizer)) for optimizer in self._optimizers)
        return next(((optimizer, why) for optimizer, why in reasons if why), (None, ""))

    def _reason(self, optimizer: Optimizer) -> str:
        if isinstance(optimizer, LBFGS):
            return "it steps all parameters together and needs a closure"
        inner = [name for name, value in vars(optimizer).items() if _contains_optimizer(value)]
        if inner:
            return f"it has optimizers inside ({inner[0]}): pass those, attach(model, [first, second], …)"
        if id(optimizer) in self._found:
            return f"it keeps state of its own outside optimizer.state, in {self._found[id(optimizer)]}"
        return ""


def _refusal(strategy: str, optimizer: Optimizer, why: str) -> SettingError:
    return SettingError(
        f"{strategy} steps some parameters apart from the others, which {type(optimizer).__name__} does not "
        f"allow: {why}. BSP, LocalSGD, SelSync, DiLoCo and SSP work with any optimizer"
    )


def _outside_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return a copy of all numbers that an optimizer keeps outside `optimizer.state`, by their names."""
    kept: dict[str, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        kept |= {f"param_groups[{number}]['{key}']": value for key, value in group.items() if key != "params"}
    kept |= {f"the attribute {name}": value for name, value in vars(optimizer).items() if name not in _TORCHS}
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in kept.items()
        if isinstance(value, Tensor | int | float | tuple)
    }


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool((one == other).all())
    return type(one) is type(other) and bool(one == other)


def _contains_optimizer(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    values = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(each, Optimizer) for each in values)
