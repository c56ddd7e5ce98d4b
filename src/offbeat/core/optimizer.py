"""View of the user's optimizers, by which a strategy steps what it chooses, when it chooses.

A strategy never has an optimizer of its own. All its steps (of some blocks, later than the rest; of a copy of
the weights; of a prediction that must not change the optimizer's state) are made by the very optimizers that
the user built, at learning rates that the strategy passes in. For such a call an optimizer gets other
parameters, rates or state; afterwards its own are restored. Its hooks do not run: they belong to the steps of
the user's loop.

Several optimizers (Muon for matrices, AdamW for the rest) look like one whose groups are all of theirs.

Such steps are right only for optimizers whose whole state lies in `optimizer.state[param]`. Others (counters
in the groups, attributes, optimizers inside) would count a step twice: `check_separable` refuses them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.core.blocks import Block
from offbeat.core.optimizer_state import ELEMENTWISE, StateWatch
from offbeat.errors import OffbeatError

OptimizerState = dict[Tensor, dict[str, Any]]
LearningRates = list[float]

_SCALING = ("grad_scale", "found_inf")  # set by a GradScaler on a fused optimizer, for the loop's own step


class OptimizerView:
    """The user's optimizers, as a strategy sees them. `optimizers` are the objects themselves."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers = optimizers
        self._predicted_state: OptimizerState = {}
        self._predicted: list[nn.Parameter] = []  # in the last prediction
        self._group_of: dict[nn.Parameter, int] = {}
        self._writes_gradients: dict[frozenset[int], bool] = {}  # whether steps of groups do, where known
        self.watch = StateWatch(optimizers)
        self._first_settings = [_settings(group) for group in self.groups]
        self._settings: dict[int, dict[str, Any]] = {}  # by group: as the loop last stepped with them
        self._held: list[tuple[Any, bool]] = []  # by optimizer: its state, and whether there was any

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups: dicts of settings, each with the parameters that it applies to."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def learning_rates(self) -> LearningRates:
        """The learning rate of each parameter group, as the user's schedule has set it."""
        return [float(group["lr"]) for group in self.groups]

    @property
    def elementwise(self) -> bool:
        """True if stepping the pieces of a parameter one by one equals stepping the whole parameter.

        Known for torch's own optimizers. Any other declares it by an attribute `elementwise = True`.
        """
        return all(
            type(optimizer) in ELEMENTWISE.values() or bool(getattr(optimizer, "elementwise", False))
            for optimizer in self.optimizers
        )

    @property
    def overflowed(self) -> bool:
        """True if a fused optimizer under a GradScaler was just called, and skipped its step."""
        found = [getattr(optimizer, "found_inf", None) for optimizer in self.optimizers]
        return any(each is not None and each.item() > 0 for each in found)

    @property
    def unscales(self) -> bool:
        """True if a fused optimizer under a GradScaler is about to step, and will unscale its gradients."""
        return any(hasattr(optimizer, "found_inf") for optimizer in self.optimizers)

    def check_unscaled(self) -> None:
        """Raise an error if gradients are still scaled: a fused optimizer unscales them in its own step."""
        if self.unscales:
            raise OffbeatError(
                "this strategy needs unscaled gradients just before the optimizer steps, but under a "
                "GradScaler a fused optimizer unscales them in its own step; build the optimizer with "
                "fused=False"
            )

    def remember_settings(self) -> None:
        """Remember the groups' settings besides the rate, with which the loop has just stepped.

        A step that a strategy makes later belongs to that one: OneCycleLR changes the momentum in between.
        """
        self._settings = {id(group): _settings(group) for group in self.groups}

    def check_settings(self, strategy: str) -> None:
        """Raise an error if a setting besides the rate has changed, where a server has the optimizer."""
        for first, group in zip(self._first_settings, self.groups, strict=True):
            changed = next((name for name, value in first.items() if group.get(name) != value), None)
            if changed is not None:
                raise OffbeatError(
                    f"{changed} is {group.get(changed)} now, and was {first[changed]} when the strategy was "
                    f"attached, but under {strategy} the server steps, and learns of learning rates only. "
                    'Keep it constant (OneCycleLR(cycle_momentum=False)), or use push="update" or a strategy '
                    "without a server"
                )

    def hold_state(self) -> None:
        """Note the optimizers' state as it is: the strategy keeps copies of it, or steps with it later."""
        self._held = [(each.state, bool(each.state)) for each in self.optimizers]

    def forget_held_state(self) -> None:
        """Let the state be replaced: a checkpoint is loaded, with the strategy's copies."""
        self._held = []

    def check_held_state(self, strategy: str) -> None:
        """Raise an error if the loop has replaced or cleared a state since `hold_state`."""
        for (state, had_any), optimizer in zip(self._held, self.optimizers, strict=bool(self._held)):
            if optimizer.state is not state or (had_any and not state):
                raise OffbeatError(
                    f"the loop has replaced or cleared the state of {type(optimizer).__name__} in the middle "
                    f"of training (load_state_dict(), state.clear()), but {strategy} steps with a copy of it "
                    "or at a later time, and would undo that. close() and attach again; to resume, call "
                    "sync.load_state_dict() as well"
                )

    def check_separable(self, strategy: str) -> None:
        """Refuse an optimizer that a strategy cannot step in parts, or a copy of: `strategy` names it."""
        self.watch.check(strategy)

    def state_of(self, param: nn.Parameter) -> dict[str, Any]:
        """Return the optimizer's state for this parameter."""
        for optimizer in self.optimizers:
            if param in optimizer.state:
                state: dict[str, Any] = optimizer.state[param]
                return state
        return {}

    def forget(self, param: nn.Parameter) -> None:
        """Free the optimizer's state for this parameter, which a strategy steps by itself from now on."""
        for optimizer in self.optimizers:
            optimizer.state.pop(param, None)

    def clear_state(self) -> None:
        """Clear the state of all optimizers, as before the first step."""
        self.forget_held_state()
        for optimizer in self.optimizers:
            optimizer.state.clear()

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
        """Step these blocks as `step` does, but change only the weights: no state, and no gradients.

        Some optimizers write into gradients, as torch's SGD with nesterov and foreach, its default on GPUs.
        """
        groups = self._groups_of(blocks)
        if self._writes_gradients.get(groups) is False:
            self._with_gradients(self._predict_params, blocks, grads, rates, without)
            return
        copies = [grad.clone() for grad in grads]
        self._with_gradients(self._predict_params, blocks, copies, rates, without)
        if groups not in self._writes_gradients and any(grad.any() for grad in grads):
            self._writes_gradients[groups] = not all(map(torch.equal, grads, copies))

    def _groups_of(self, blocks: Collection[Block]) -> frozenset[int]:
        """Return the numbers of the parameter groups that have parameters in these blocks."""
        if not self._group_of:
            self._group_of = {p: i for i, group in enumerate(self.groups) for p in group["params"]}
        return frozenset(self._group_of[param] for block in blocks for param in block.params)

    def forget_prediction(self) -> None:
        """Forget the last prediction, before another one that may be kept."""
        self._predicted = []

    def keep_prediction(self) -> None:
        """Make the state of a prediction since then the optimizers' own: its weights are kept, too."""
        for param in self._predicted:
            predicted, own = self._predicted_state[param], self.state_of(param)
            for key, value in predicted.items():
                if isinstance(value, Tensor) and isinstance(own.get(key), Tensor):
                    own[key].copy_(value)
                elif own:
                    own[key] = value
            if not own:
                owner = next(o for o in self.optimizers for g in o.param_groups if _holds(g, param))
                owner.state[param] = self._predicted_state.pop(param)

    def step_tensors(
        self, params: Sequence[list[Tensor]], rates: LearningRates, state: OptimizerState | None
    ) -> None:
        """Step a strategy's own tensors, one list per parameter group, with a state of their own.

        `state` is that of all optimizers together; None: each uses its own.
        """
        remaining = zip(params, rates, strict=True)
        for optimizer in self.optimizers:
            own = list(islice(remaining, len(optimizer.param_groups)))
            _step_tensors(optimizer, own, state, self._settings)

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
        self.step_tensors(self._by_group(params), rates, None)

    def _predict_params(self, params: list[nn.Parameter], rates: LearningRates) -> None:
        self._copy_state(params)
        self.step_tensors(self._by_group(params), rates, self._predicted_state)
        self._predicted = params

    def _by_group(self, params: list[nn.Parameter]) -> list[list[Tensor]]:
        wanted = set(params)
        return [[p for p in group["params"] if p in wanted] for group in self.groups]

    def _copy_state(self, params: list[nn.Parameter]) -> None:
        """Copy the optimizer's state for a prediction, into memory that the first call allocates."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for param in params:
            copied = self._predicted_state.setdefault(param, {})
            real = self.state_of(param)
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


def _step_tensors(
    optimizer: Optimizer,
    params: Sequence[tuple[list[Tensor], float]],
    state: OptimizerState | None,
    settings: dict[int, dict[str, Any]],
) -> None:
    """Step other tensors than its own with an optimizer, at other rates, one pair for each of its groups.

    `settings` are the groups' own at the time of the step that this belongs to.
    """
    groups, own_state = optimizer.param_groups, optimizer.state
    own_groups = [(group, dict(group)) for group in groups]
    scaling = {key: vars(optimizer).pop(key) for key in _SCALING if key in vars(optimizer)}
    step = type(optimizer).step
    step = getattr(step, "__wrapped__", step)  # beneath torch's wrapper, which runs the hooks
    try:
        for group, (tensors, rate) in zip(groups, params, strict=True):
            group.update(settings.get(id(group), {}), params=tensors)
            if isinstance(group["lr"], Tensor):
                group["lr"] = torch.full_like(group["lr"], rate)
            else:
                group["lr"] = rate
        if state is not None:
            optimizer.state = state  # type: ignore[assignment]
        step(optimizer)
    finally:
        optimizer.state = own_state
        vars(optimizer).update(scaling)
        for group, own in own_groups:
            group.update(own)


def _holds(group: dict[str, Any], param: nn.Parameter) -> bool:
    return any(each is param for each in group["params"])


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers among a group's settings, without its learning rate and what belongs to that."""
    kinds = (bool, int, float, tuple)
    return {name: value for name, value in group.items() if "lr" not in name and isinstance(value, kinds)}
