"""The next forward of a model, or of a part of it, is seen once, and only while it is expected."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules import module

from offbeat.core.forward import NextForward


class Calls:
    """A count of the calls."""

    count = 0

    def add(self) -> None:
        self.count += 1


def test_a_part_of_the_model_is_enough_and_a_stranger_is_not() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    calls = Calls()
    forward = NextForward(model, calls.add)
    x = torch.ones(1, 2)
    model(x)
    assert calls.count == 0
    forward.expect()
    forward.expect()
    nn.Linear(2, 2)(x)
    assert calls.count == 0
    model[0](x)
    model(x)
    assert calls.count == 1


def test_nothing_is_left_behind() -> None:
    model = nn.Linear(2, 2)
    before = len(module._global_forward_pre_hooks)
    forward = NextForward(model, Calls().add)
    forward.expect()
    forward.cancel()
    forward.cancel()
    model(torch.ones(1, 2))
    assert len(module._global_forward_pre_hooks) == before
