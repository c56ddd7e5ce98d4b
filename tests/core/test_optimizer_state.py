"""Optimizers that keep state outside `state[param]` are found by their first step, and refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Muon, Optimizer

from offbeat.core.optimizer_state import SEPARABLE, StateWatch
from offbeat.errors import SettingError


class Plain(Optimizer):
    """A class of the user's own, all of whose state is in `state[param]`."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    count = self.state[param].get("count", 0) + 1
                    self.state[param]["count"] = count
                    param.sub_(param.grad, alpha=group["lr"] / count)


class CountsInGroup(Plain):
    """As schedule-free optimizers do: `k`, and a running weight."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


class ProdigyLike(Plain):
    """An estimate of the distance, in a group, is made from all gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            group["d"] = 1e-6

    def step(self, closure: Any = None) -> None:
        total = sum(float(p.grad.abs().sum()) for group in self.param_groups for p in group["params"])
        super().step()
        for group in self.param_groups:
            group["d"] = max(group["d"], 1e-3 * total)


class TensorInGroup(Plain):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.param_groups[0]["momentum"] = torch.zeros(3)

    def step(self, closure: Any = None) -> None:
        super().step()
        self.param_groups[0]["momentum"].add_(1)


class CountsInAttribute(Plain):
    seen = 0

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.seen = 0

    def step(self, closure: Any = None) -> None:
        super().step()
        self.seen += 1


class Facade(Optimizer):
    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, {"lr": 0.1})
        self.inner = [SGD(params[:1], lr=0.1), AdamW(params[1:], lr=0.1)]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.inner:
            each.step()


class FacadeInDict(Facade):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.inner = {"first": self.inner[0], "second": self.inner[1]}  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None: ...


def _watched(make: Callable[[Any], Optimizer], steps: int = 1) -> StateWatch:
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())
    watch = StateWatch([optimizer])
    for _ in range(steps):
        model(torch.randn(4, 3)).square().mean().backward()
        watch.on_step_start(optimizer)
        optimizer.step()
        watch.on_step_end(optimizer)
    return watch


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(
    ("make", "place"),
    [
        (CountsInGroup, r"CountsInGroup.*param_groups\[0\]\['k'\]"),
        (ProdigyLike, r"ProdigyLike.*param_groups\[0\]\['d'\]"),
        (TensorInGroup, r"TensorInGroup.*param_groups\[0\]\['momentum'\]"),
        (CountsInAttribute, r"CountsInAttribute.*the attribute seen"),
        (Facade, r"Facade.*optimizers inside \(inner\).*\[first, second\]"),
        (FacadeInDict, r"FacadeInDict.*optimizers inside \(inner\)"),
    ],
)
def test_state_elsewhere_is_named(make: Callable[[Any], Optimizer], place: str, steps: int) -> None:
    with pytest.raises(SettingError, match=f"osp steps some parameters apart.*{place}"):
        _watched(make, steps).check("osp")


def test_lbfgs_is_refused_before_any_step() -> None:
    watch = StateWatch([LBFGS(nn.Linear(3, 2).parameters())])
    with pytest.raises(SettingError, match=r"LBFGS.*steps all parameters together"):
        watch.check("osp")


def test_state_by_parameter_is_allowed() -> None:
    _watched(Plain, 3).check("osp")


def test_a_schedule_between_two_steps_is_no_state() -> None:
    """Learning rates change outside step()."""
    model = nn.Linear(3, 2)
    optimizer = Plain(model.parameters())
    watch = StateWatch([optimizer])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(3):
        model(torch.randn(4, 3)).square().mean().backward()
        watch.on_step_start(optimizer)
        optimizer.step()
        watch.on_step_end(optimizer)
        schedule.step()
    watch.check("osp")


def test_muon_is_allowed() -> None:
    weight = nn.Parameter(torch.randn(3, 2))
    optimizer = Muon([weight], lr=0.1)
    watch = StateWatch([optimizer])
    weight.grad = torch.randn(3, 2)
    watch.on_step_start(optimizer)
    optimizer.step()
    watch.on_step_end(optimizer)
    watch.check("osp")


@pytest.mark.parametrize("make", SEPARABLE, ids=lambda cls: cls.__name__)
def test_the_list_of_torchs_own_is_true(make: Any) -> None:
    """Watch a subclass, which is on no list, so that its state is looked for."""
    watch = _watched(type("Unlisted", (make,), {}), 2)
    watch.check("osp")
    assert not any(isinstance(value, Tensor) for value in watch._before.values())
