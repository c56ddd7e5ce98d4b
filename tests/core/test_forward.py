"""The next forward of a model, or of a part of it, is seen once, and only while it is expected."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules import module

from offbeat.core.forward import NextForward


def test_a_part_of_the_model_is_enough_and_a_stranger_is_not() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    calls: list[str] = []
    forward = NextForward(model, lambda: calls.append("forward"))
    x = torch.ones(1, 2)
    model(x)
    assert calls == []
    forward.expect()
    forward.expect()
    nn.Linear(2, 2)(x)
    assert calls == []
    model[0](x)
    model(x)
    assert calls == ["forward"]


def test_nothing_is_left_behind() -> None:
    model = nn.Linear(2, 2)
    before = len(module._global_forward_pre_hooks)
    forward = NextForward(model, lambda: None)
    forward.expect()
    forward.cancel()
    forward.cancel()
    model(torch.ones(1, 2))
    assert len(module._global_forward_pre_hooks) == before
