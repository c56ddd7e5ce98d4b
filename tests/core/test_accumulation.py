"""A backward that adds to gradients is told from one that starts anew, whatever the loop does in between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from offbeat.core.accumulation import SAMPLES, AccumulationDetector


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def _is_added_to(model: nn.Module, between: Callable[[nn.Module], None]) -> bool:
    """Run two backwards with something in between; the answer as the second reaches its first parameter."""
    detector = AccumulationDetector(list(model.parameters()))
    answers: list[bool] = []

    def hook(param: torch.Tensor) -> None:
        if remembered and not answers:
            answers.append(detector.is_added_to(param))  # type: ignore[arg-type]

    remembered = False
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)
    model(torch.randn(5, 4)).square().mean().backward()
    detector.remember()
    remembered = True
    between(model)
    model(torch.randn(5, 4)).square().mean().backward()
    return answers[0]


def _nothing(model: nn.Module) -> None: ...


def _to_none(model: nn.Module) -> None:
    model.zero_grad(set_to_none=True)


def _to_zero(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def _clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def _replace(model: nn.Module) -> None:
    """A loop that keeps its gradients elsewhere between two backwards."""
    for param in model.parameters():
        assert param.grad is not None
        param.grad = param.grad.clone()


def _to_other_zeros(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = torch.zeros_like(param)


CASES = [
    (_nothing, True),
    (_clip, True),
    (_replace, True),
    (_to_none, False),
    (_to_zero, False),
    (_to_other_zeros, False),
]


@pytest.mark.parametrize(("between", "added"), CASES)
@pytest.mark.parametrize("make", [_net, lambda: nn.Linear(4, 3)], ids=["several", "two"])
def test_the_gradients_tell(
    make: Callable[[], nn.Module], between: Callable[[nn.Module], None], added: bool
) -> None:
    assert _is_added_to(make(), between) is added


@pytest.mark.parametrize(("between", "added"), [(_nothing, True), (_to_none, False), (_to_zero, False)])
def test_of_a_single_parameter(between: Callable[[nn.Module], None], added: bool) -> None:
    """It has its gradient already when it is reached: only its memory tells."""
    assert _is_added_to(nn.Linear(4, 3, bias=False), between) is added


def test_one_gradient_that_stays_is_enough() -> None:
    """The loop clears a part of the model only, say a head that it trains alone."""

    def clear_the_head(model: nn.Module) -> None:
        model[2].zero_grad()
        model[0].bias.grad = None

    assert not _is_added_to(_net(), _to_none)
    model = _net()
    assert _is_added_to(model, lambda m: m[2].zero_grad())
    assert isinstance(_is_added_to(_net(), clear_the_head), bool)


def test_nothing_remembered_nothing_added() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    assert not AccumulationDetector([weight]).is_added_to(weight)


def test_no_gradient_is_held() -> None:
    """What is remembered is where a gradient lies, so its memory can be freed."""
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    detector = AccumulationDetector([weight])
    detector.remember()
    held = [value for values in detector._seen.values() for value in values]
    assert all(isinstance(value, int) for value in held)


def test_gradients_beyond_those_that_are_remembered_tell_too() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    remembered = list(model.parameters())[:SAMPLES]

    def zero_some(_: nn.Module) -> None:
        for param in remembered:
            assert param.grad is not None
            param.grad.zero_()

    assert _is_added_to(model, zero_some)
    assert not _is_added_to(model, _to_zero)
