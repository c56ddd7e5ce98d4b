"""Checks before a strategy is attached, and a fingerprint to compare with the other ranks'."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from offbeat.core.strategy import Strategy
from offbeat.errors import OffbeatError, SettingError


def check_attachable(model: nn.Module, optimizer: Optimizer, strategy: Strategy[Any]) -> None:
    """Raise an error that says what to do, if this model and optimizer cannot train."""
    if not isinstance(strategy, Strategy):
        what = f"the class {strategy.__name__}" if isinstance(strategy, type) else repr(strategy)
        raise SettingError(f"strategy must be an instance, such as offbeat.LocalSGD(period=8), not {what}")
    if isinstance(model, DistributedDataParallel):
        raise SettingError("the model is wrapped in DistributedDataParallel; attach the bare model instead")
    own = set(model.parameters())
    foreign = [p for group in optimizer.param_groups for p in group["params"] if p not in own]
    if foreign:
        shapes = ", ".join(str(list(p.shape)) for p in foreign[:3])
        raise SettingError(
            f"the optimizer steps {len(foreign)} parameters that are not the model's (of shape {shapes}); "
            "build it from model.parameters() of the model you attach"
        )


def check_frozen(frozen: list[tuple[str, nn.Parameter]]) -> None:
    """Raise an error if a frozen parameter was unfrozen: each rank would silently train its own copy."""
    for name, param in frozen:
        if param.requires_grad:
            raise OffbeatError(
                f"parameter {name} was frozen when the strategy was attached and now has requires_grad=True; "
                "close() and attach again after unfreezing"
            )


def fingerprint(
    model: nn.Module, optimizer: Optimizer, strategy: Strategy[Any], buffers: str
) -> dict[str, str]:
    """Describe a rank's model, optimizer and strategy, line by line; order and strides imply the layout."""
    lines = {"strategy": repr(strategy), "optimizer": type(optimizer).__name__, "buffers=": buffers}
    for number, (name, param) in enumerate(model.named_parameters(), 1):
        frozen = "" if param.requires_grad else ", frozen"
        layout = f"parameter {number} with strides {list(param.stride())}"
        lines[f"parameter {name}"] = f"{param.dtype} {list(param.shape)}{frozen}, {layout}"
    for name, buffer in model.named_buffers():
        lines[f"buffer {name}"] = f"{buffer.dtype} {list(buffer.shape)}"
    return lines
