"""Checks before a strategy is attached, and a fingerprint to compare with the other ranks'."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from offbeat.core.strategy import Strategy
from offbeat.errors import OffbeatError, SettingError

_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel"}  # average gradients themselves


def unwrap(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Return the bare optimizers, without the wrappers that frameworks put around them."""
    given = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    if not given or not all(isinstance(each, Optimizer) for each in given):
        raise SettingError(
            f"optimizer must be a torch optimizer or a list of them, such as [muon, adamw], not {optimizer!r}"
        )
    return [_bare(each) for each in given]


def _bare(optimizer: Optimizer) -> Optimizer:
    for name in ("optimizer", "_optimizer", "base_optimizer"):  # Accelerate's, Lightning's, SAM's
        inner = getattr(optimizer, name, None)
        if isinstance(inner, Optimizer) and inner.param_groups is optimizer.param_groups:
            return _bare(inner)
    return optimizer


def check_attachable(model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy[Any]) -> None:
    """Raise an error that says what to do, if this model and these optimizers cannot train."""
    if not isinstance(strategy, Strategy):
        what = f"the class {strategy.__name__}" if isinstance(strategy, type) else repr(strategy)
        raise SettingError(f"strategy must be an instance, such as offbeat.LocalSGD(period=8), not {what}")
    for name, param in model.named_parameters():
        if isinstance(param, UninitializedParameter):
            raise SettingError(
                f"parameter {name} has no shape yet: it belongs to a lazy layer. Call the model once, before "
                "attach and before the optimizer is built"
            )
        if param.is_meta:
            raise SettingError(
                f"parameter {name} is on the meta device and has no values; materialize the model before "
                "attach (model.to_empty(), then initialize or load it)"
            )
    own = set(model.parameters())
    stepped = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    foreign = [p for p in stepped if p not in own]
    if foreign:
        shapes = ", ".join(str(list(p.shape)) for p in foreign[:3])
        raise SettingError(
            f"the optimizer steps {len(foreign)} parameters that are not the model's (of shape {shapes}); "
            "build it from model.parameters() of the model you attach"
        )
    names = {param: name for name, param in model.named_parameters()}
    if len(set(stepped)) < len(stepped):
        twice = next(p for p, count in Counter(stepped).items() if count > 1)
        raise SettingError(f"parameter {names[twice]} belongs to two of the optimizers: give it to one")
    known = set(stepped)
    unowned = [name for param, name in names.items() if param.requires_grad and param not in known]
    if unowned:
        more = f" and {len(unowned) - 3} more" if len(unowned) > 3 else ""
        raise SettingError(
            f"no attached optimizer steps {', '.join(unowned[:3])}{more}: attach all optimizers, "
            "attach(model, [first, second], strategy), or freeze these parameters (requires_grad=False)"
        )


def check_unwrapped(model: nn.Module) -> None:
    """Refuse a model whose gradients DistributedDataParallel or FSDP1 averages as well.

    Such a wrapper may be around the model or inside it, and torch keeps no list of them: look at all objects.
    """
    if _wrapper_of(model) is None:
        return
    gc.collect()  # a wrapper that nobody uses any more
    wrapper = _wrapper_of(model)
    if wrapper is not None:
        instead = "Train the bare model instead"
        if wrapper == "FullyShardedDataParallel":
            instead = "Shard it by torch.distributed.fsdp.fully_shard instead, and attach with group="
        raise SettingError(
            f"the model, or a part of it, is wrapped in {wrapper}, which averages the gradients of "
            f"all ranks itself: the strategy would change nothing. {instead}, and delete the wrapper"
        )


def _wrapper_of(model: nn.Module) -> str | None:
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, nn.Module) and _averages(kind)}
    if not kinds:  # as a rule: a program has a million objects of a few thousand classes
        return None
    own = {id(param) for param in model.parameters()}
    for each in objects:
        if type(each) in kinds and any(id(param) in own for param in each.parameters()):
            return _averages(type(each)).pop()
    return None


def _averages(kind: type[nn.Module]) -> set[str]:
    """Return the wrappers that a class of modules is, or derives from."""
    return _WRAPPERS & {cls.__name__ for cls in kind.__mro__}


def check_frozen(frozen: list[tuple[str, nn.Parameter]]) -> None:
    """Raise an error if a frozen parameter was unfrozen: each rank would silently train its own copy."""
    for name, param in frozen:
        if param.requires_grad:
            raise OffbeatError(
                f"parameter {name} was frozen when the strategy was attached and now has requires_grad=True; "
                "close() and attach again after unfreezing"
            )


def fingerprint(
    model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy[Any], buffers: str
) -> dict[str, str]:
    """Describe a rank's model, optimizer and strategy, line by line; order and strides imply the layout."""
    classes = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
    lines = {"strategy": repr(strategy), "optimizer": classes, "buffers=": buffers}
    for number, (name, param) in enumerate(model.named_parameters(), 1):
        frozen = "" if param.requires_grad else ", frozen"
        layout = f"parameter {number} with strides {list(param.stride())}"
        lines[f"parameter {name}"] = f"{param.dtype} {list(param.shape)}{frozen}, {layout}"
    for name, buffer in model.named_buffers():
        lines[f"buffer {name}"] = f"{buffer.dtype} {list(buffer.shape)}"
    return lines
