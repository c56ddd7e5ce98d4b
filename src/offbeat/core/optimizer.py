"""Stepper: the user's own optimizer, made to step what a strategy says and when it says so.

A strategy never has an optimizer of its own. Whatever it steps (some blocks, later than the rest; a copy of
the weights; a prediction that must leave no trace in the optimizer's state) goes through the very optimizer
that the user built, with the learning rates of the moment that the strategy names. For that moment the
optimizer is given other parameters, other rates or another state; afterwards it has its own again. Its hooks
are not run: to the user's loop a step is what the loop itself asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
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

OptimizerState = dict[Tensor, dict[str, Any]]
LearningRates = list[float]

# Their step of one element looks at no other: a parameter may be cut, and its pieces stepped apart.
_KINDS = (SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, Rprop, ASGD)
ELEMENTWISE: dict[str, Any] = {kind.__name__: kind for kind in _KINDS}
_SCALING = ("grad_scale", "found_inf")  # what a GradScaler tells a fused optimizer, for the loop's own step


class OptimizerView:
    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        step = type(optimizer).step
        self._step = getattr(step, "__wrapped__", step)  # beneath torch's wrapper, which runs the hooks
        self._sketch: OptimizerState = {}

    @property
    def elementwise(self) -> bool:
        """Whether pieces of a parameter, stepped apart, become what the whole would have become.

        Known of torch's own. Any other optimizer says so by an attribute `elementwise = True`.
        """
        return type(self.optimizer) in ELEMENTWISE.values() or bool(
            getattr(self.optimizer, "elementwise", False)
        )

    @property
    def rates(self) -> LearningRates:
        """The learning rate of each parameter group, as the user's schedule has it now."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    @property
    def overflowed(self) -> bool:
        """Whether a fused optimizer, to which a GradScaler leaves that, was called and skipped its step."""
        found = getattr(self.optimizer, "found_inf", None)
        return found is not None and found.item() > 0

    def step(self, params: Collection[Tensor], rates: LearningRates) -> None:
        """Step these parameters, with the gradients that they hold."""
        self.step_tensors(self._by_group(params), rates, self.optimizer.state)

    def predict(self, params: Collection[Tensor], rates: LearningRates) -> None:
        """As `step`, but the optimizer's state stays what it was."""
        self._copy_state(params)
        self.step_tensors(self._by_group(params), rates, self._sketch)

    def step_tensors(
        self, params: Sequence[list[Tensor]], rates: LearningRates, state: OptimizerState
    ) -> None:
        """Step what lies in `params`, a list for each parameter group, with a state of its own."""
        optimizer, groups = self.optimizer, self.optimizer.param_groups
        kept = [(group["params"], group["lr"]) for group in groups]
        own = optimizer.state
        scaling = {key: vars(optimizer).pop(key) for key in _SCALING if key in vars(optimizer)}
        try:
            for group, some, rate in zip(groups, params, rates, strict=True):
                group["params"] = some
                if isinstance(group["lr"], Tensor):
                    group["lr"] = torch.full_like(group["lr"], rate)
                else:
                    group["lr"] = rate
            optimizer.state = state  # type: ignore[assignment]
            self._step(optimizer)
        finally:
            optimizer.state = own
            vars(optimizer).update(scaling)
            for group, (all_of_them, rate) in zip(groups, kept, strict=True):
                group["params"], group["lr"] = all_of_them, rate

    def _by_group(self, params: Collection[Tensor]) -> list[list[Tensor]]:
        wanted = set(params)
        return [[p for p in group["params"] if p in wanted] for group in self.optimizer.param_groups]

    def _copy_state(self, params: Collection[Tensor]) -> None:
        """Bring the sketch of the optimizer's state up to date, in memory that it already has."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for param in params:
            sketch = self._sketch.setdefault(param, {})
            real = self.optimizer.state.get(param, {})
            for key in sketch.keys() - real.keys():  # made by an optimizer that has yet to make the real one
                del sketch[key]
            for key, value in real.items():
                if isinstance(value, Tensor):
                    if key not in sketch:
                        sketch[key] = torch.empty_like(value)
                    targets.append(sketch[key])
                    sources.append(value)
                else:
                    sketch[key] = value
        if targets:
            torch._foreach_copy_(targets, sources)
