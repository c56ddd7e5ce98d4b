"""Ownership: which optimizer steps which parameter. As it was at attach, so it must stay.

A strategy knows the parameters and optimizers that it was attached to. A parameter that comes later (a layer
that was replaced, a group that was added) and an optimizer that was built anew would train on each rank by
itself, and no step of theirs would be seen: each is refused, with what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from offbeat.errors import OffbeatError

_AGAIN = "close() and attach again, with the model and the optimizers as they are then"


class Ownership:
    """The trainable parameters of a model and their optimizers, as they were at attach."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        owned = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._kept = [param for _, param in owned]  # so that no other object gets their ids
        self._names = {id(param): name for name, param in owned}
        self._params = {id(optimizer): _ids(optimizer) for optimizer in optimizers}
        self.is_stepping = False  # an attached optimizer is inside its step()

    def watch(self) -> Any:
        """Watch the steps of all optimizers of this process; return a handle that ends this."""
        return register_optimizer_step_pre_hook(self._before_any_step)

    def on_step_start(self, optimizer: Optimizer) -> None:
        """Raise an error if an attached optimizer, about to step, has other parameters than at attach."""
        if _ids(optimizer) != self._params[id(optimizer)]:
            raise OffbeatError(
                f"the parameters of {type(optimizer).__name__} are not those that it had when the strategy "
                f"was attached (by add_param_group(), or an assignment): new ones would train on each rank "
                f"by itself. {_AGAIN}"
            )
        self.is_stepping = True

    def on_step_end(self) -> None:
        """Note that the attached optimizer has stepped."""
        self.is_stepping = False

    def check_model(self) -> None:
        """Raise an error if the model has trainable parameters that it did not have at attach.

        FSDP2 has others itself while it computes; of a sharded model, `LocalModel` checks the memory.
        """
        if any(hasattr(param, "to_local") for param in self._kept):
            return
        for name, param in self._model.named_parameters():
            if param.requires_grad and id(param) not in self._names:
                raise OffbeatError(
                    f"parameter {name} came into the model, or began to train, after the strategy was "
                    "attached (a layer was replaced, load_state_dict(assign=True), a parametrization, or it "
                    f"was frozen): it would train on each rank by itself. {_AGAIN}"
                )

    def _before_any_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Refuse an optimizer that is not attached and steps an attached parameter, except inside another."""
        if id(optimizer) in self._params or self.is_stepping:
            return
        known = next((self._names[each] for each in _ids(optimizer) if each in self._names), None)
        if known is not None:
            raise OffbeatError(
                f"a {type(optimizer).__name__} that is not attached steps parameter {known} of the attached "
                "model: the strategy would not see it. Attach the optimizers that step, attach(model, "
                f"[first, second], strategy). If this one was built later: {_AGAIN}"
            )


def _ids(optimizer: Optimizer) -> tuple[int, ...]:
    return tuple(map(id, chain.from_iterable(group["params"] for group in optimizer.param_groups)))
