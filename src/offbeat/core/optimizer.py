"""View of the user's optimizer, by which a strategy steps what it chooses, when it chooses.

A strategy never has an optimizer of its own. All its steps (of some blocks, later than the rest; of a copy of
the weights; of a prediction that must not change the optimizer's state) are made by the very optimizer that
the user built, at learning rates that the strategy passes in. For such a call the optimizer gets other
parameters, rates or state; afterwards its own are restored. Its hooks do not run: they belong to the steps of
the user's loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
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

from offbeat.core.blocks import Block
from offbeat.errors import OffbeatError

OptimizerState = dict[Tensor, dict[str, Any]]
LearningRates = list[float]

# These step each element independently of all others: a parameter may be cut, and its pieces stepped apart.
_CLASSES = (SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, Rprop, ASGD)
ELEMENTWISE: dict[str, Any] = {cls.__name__: cls for cls in _CLASSES}
_SCALING = ("grad_scale", "found_inf")  # set by a GradScaler on a fused optimizer, for the loop's own step


class OptimizerView:
    """The user's optimizer, as a strategy sees it. `wrapped` is the optimizer itself."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.wrapped = optimizer
        step = type(optimizer).step
        self._step = getattr(step, "__wrapped__", step)  # beneath torch's wrapper, which runs the hooks
        self._predicted_state: OptimizerState = {}

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups: dicts of settings, each with the parameters that it applies to."""
        return self.wrapped.param_groups

    @property
    def learning_rates(self) -> LearningRates:
        """The learning rate of each parameter group, as the user's schedule has set it."""
        return [float(group["lr"]) for group in self.wrapped.param_groups]

    @property
    def elementwise(self) -> bool:
        """True if stepping the pieces of a parameter one by one equals stepping the whole parameter.

        Known for torch's own optimizers. Any other declares it by an attribute `elementwise = True`.
        """
        return type(self.wrapped) in ELEMENTWISE.values() or bool(getattr(self.wrapped, "elementwise", False))

    @property
    def overflowed(self) -> bool:
        """True if a fused optimizer under a GradScaler was just called, and skipped its step."""
        found = getattr(self.wrapped, "found_inf", None)
        return found is not None and found.item() > 0

    def check_unscaled(self) -> None:
        """Raise an error if gradients are still scaled: a fused optimizer unscales them in its own step."""
        if hasattr(self.wrapped, "found_inf"):
            raise OffbeatError(
                "this strategy needs unscaled gradients just before the optimizer steps, but under a "
                "GradScaler a fused optimizer unscales them in its own step; build the optimizer with "
                "fused=False"
            )

    def state_of(self, param: nn.Parameter) -> dict[str, Any]:
        """Return the optimizer's state for this parameter."""
        state: dict[str, Any] = self.wrapped.state.get(param, {})
        return state

    def step(
        self,
        blocks: Collection[Block],
        grads: list[Tensor],
        rates: LearningRates,
        without: Collection[nn.Parameter] = frozenset(),
    ) -> None:
        """Step these blocks now, with these flat gradients and learning rates.

        Parameters in `without` have no gradient: weight decay and momentum leave them alone.
        """
        self._with_gradients(self._step_params, blocks, grads, rates, without)

    def predict(
        self,
        blocks: Collection[Block],
        grads: list[Tensor],
        rates: LearningRates,
        without: Collection[nn.Parameter] = frozenset(),
    ) -> None:
        """Step these blocks as `step` does, but change only the weights, not the optimizer's state."""
        self._with_gradients(self._predict_params, blocks, grads, rates, without)

    def step_tensors(
        self, params: Sequence[list[Tensor]], rates: LearningRates, state: OptimizerState
    ) -> None:
        """Step a strategy's own tensors, one list per parameter group, with a state of their own."""
        optimizer, groups = self.wrapped, self.wrapped.param_groups
        own_groups = [(group["params"], group["lr"]) for group in groups]
        own_state = optimizer.state
        scaling = {key: vars(optimizer).pop(key) for key in _SCALING if key in vars(optimizer)}
        try:
            for group, tensors, rate in zip(groups, params, rates, strict=True):
                group["params"] = tensors
                if isinstance(group["lr"], Tensor):
                    group["lr"] = torch.full_like(group["lr"], rate)
                else:
                    group["lr"] = rate
            optimizer.state = state  # type: ignore[assignment]
            self._step(optimizer)
        finally:
            optimizer.state = own_state
            vars(optimizer).update(scaling)
            for group, (own_params, own_rate) in zip(groups, own_groups, strict=True):
                group["params"], group["lr"] = own_params, own_rate

    def _with_gradients(
        self,
        step: Callable[[list[nn.Parameter], LearningRates], None],
        blocks: Collection[Block],
        grads: list[Tensor],
        rates: LearningRates,
        without: Collection[nn.Parameter],
    ) -> None:
        params = [param for block in blocks for param in block.params]
        before = [param.grad for param in params]
        for block, flat in zip(blocks, grads, strict=True):
            for param, view in zip(block.params, block.views(flat), strict=True):
                param.grad = None if param in without else view
        step(params, rates)
        for param, grad in zip(params, before, strict=True):
            param.grad = grad

    def _step_params(self, params: list[nn.Parameter], rates: LearningRates) -> None:
        self.step_tensors(self._by_group(params), rates, self.wrapped.state)

    def _predict_params(self, params: list[nn.Parameter], rates: LearningRates) -> None:
        self._copy_state(params)
        self.step_tensors(self._by_group(params), rates, self._predicted_state)

    def _by_group(self, params: list[nn.Parameter]) -> list[list[Tensor]]:
        wanted = set(params)
        return [[p for p in group["params"] if p in wanted] for group in self.wrapped.param_groups]

    def _copy_state(self, params: list[nn.Parameter]) -> None:
        """Copy the optimizer's state for a prediction, into memory that the first call allocates."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for param in params:
            copied = self._predicted_state.setdefault(param, {})
            real = self.wrapped.state.get(param, {})
            for key in copied.keys() - real.keys():  # made by a prediction before the first real step
                del copied[key]
            for key, value in real.items():
                if isinstance(value, Tensor):
                    if key not in copied:
                        copied[key] = torch.empty_like(value)
                    targets.append(copied[key])
                    sources.append(value)
                else:
                    copied[key] = value
        if targets:
            torch._foreach_copy_(targets, sources)
