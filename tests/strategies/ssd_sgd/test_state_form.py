"""Forms of an optimizer's state: found by a trial as they are found in a stepped parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Muon, NAdam, Optimizer

from offbeat.core.optimizer import OptimizerView
from offbeat.errors import SettingError
from offbeat.strategies.ssd_sgd.state_form import as_laid_out, form_of, set_number

Make = Callable[[Any], Optimizer]
EXPECTED: dict[str, tuple[Make, set[str], set[str]]] = {
    "sgd": (lambda p: SGD(p, lr=0.1), set(), set()),
    "momentum": (lambda p: SGD(p, lr=0.1, momentum=0.9), {"momentum_buffer"}, set()),
    "adamw": (lambda p: AdamW(p), {"exp_avg", "exp_avg_sq"}, {"step"}),
    "nadam": (lambda p: NAdam(p), {"exp_avg", "exp_avg_sq"}, {"step", "mu_product"}),
    "muon": (lambda p: Muon(p, lr=0.1), {"momentum_buffer"}, set()),
    "adafactor": (lambda p: Adafactor(p), {"row_var", "col_var"}, {"step"}),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_trial_shows_what_a_step_leaves(name: str) -> None:
    make, tensors, numbers = EXPECTED[name]
    param = nn.Parameter(torch.randn(4, 6))
    optimizer = make([param])
    with torch.no_grad():
        tried = form_of(OptimizerView(optimizer), param)
        assert not optimizer.state, "the trial leaves nothing behind"
        param.grad = torch.ones_like(param)
        before = param.clone()
        optimizer.step()
        stepped = form_of(OptimizerView(optimizer), param)
    assert (set(tried.tensors), set(tried.numbers)) == (tensors, numbers)
    assert (stepped.tensors, set(stepped.numbers)) == (tried.tensors, numbers)
    assert not torch.equal(before, param)
    tried.check(optimizer.state[param])
    assert all(form.cut == (name != "adafactor") for form in tried.tensors.values())


def test_what_cannot_be_sent_is_refused_by_its_name() -> None:
    param = nn.Parameter(torch.zeros(3))
    optimizer = SGD([param], lr=0.1)
    optimizer.state[param] = {"history": [1.0, 2.0]}
    with pytest.raises(SettingError, match=r"state\[param\]\['history'\] is a list"):
        form_of(OptimizerView(optimizer), param)


def test_a_form_that_changes_is_refused() -> None:
    param = nn.Parameter(torch.zeros(3))
    form = form_of(OptimizerView(SGD([param], lr=0.1)), param)
    with pytest.raises(SettingError, match="It was empty, and is \\['momentum_buffer'\\] now"):
        form.check({"momentum_buffer": torch.zeros(3)})


def test_a_tensor_that_lies_in_memory_otherwise_is_laid_out_anew() -> None:
    param = torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    state = {"m": torch.randn(2, 3, 4, 5)}
    before = state["m"].clone()
    assert as_laid_out(state, "m", param).stride() == param.stride()
    assert torch.equal(state["m"], before)


def test_numbers_stay_what_they_are() -> None:
    state: dict[str, Any] = {"step": torch.tensor(3.0)}
    kept = state["step"]
    set_number(state, "step", torch.tensor(0.0), 5.0)
    set_number(state, "n", 0, torch.tensor(7.0))
    set_number(state, "more", torch.tensor(0.0), 2.0)
    assert state["step"] is kept
    assert (float(kept), state["n"], float(state["more"])) == (5.0, 7, 2.0)
    assert isinstance(state["n"], int)
