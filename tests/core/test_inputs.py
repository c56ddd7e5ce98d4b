"""StepInputs: samples and losses count once, from one taking to the next."""

from __future__ import annotations

import pytest
import torch

import offbeat
from offbeat.core.inputs import StepInputs
from offbeat.core.replica import Replica
from offbeat.errors import SettingError
from tests.support import loops


def test_samples_count_once_their_backward_has_ended() -> None:
    inputs = StepInputs()
    inputs.upcoming += 3
    inputs.upcoming += 4
    with pytest.raises(SettingError, match=r"sync\.samples"):
        inputs.take_samples()
    inputs.count()
    inputs.upcoming += 5
    assert inputs.take_samples() == 7
    inputs.count()
    assert inputs.take_samples() == 5


def test_the_mean_loss_since_it_was_last_taken() -> None:
    inputs = StepInputs()
    inputs.record_losses()
    for loss in (torch.tensor(1.0, requires_grad=True), torch.tensor(2.0)):
        inputs.report_loss(loss)
    assert inputs.take_loss() == 1.5
    inputs.report_loss(4.0)
    assert inputs.take_loss() == 4.0
    with pytest.raises(SettingError, match=r"sync\.loss"):
        inputs.take_loss()


def test_losses_that_no_strategy_asked_for_are_not_kept() -> None:
    inputs = StepInputs()
    inputs.report_loss(torch.tensor(1.0))
    inputs.record_losses()
    with pytest.raises(SettingError, match=r"sync\.loss"):
        inputs.take_loss()


def test_samples_are_taken_once() -> None:
    replica = Replica(loops.mlp())
    replica.inputs.samples += 8
    assert replica.inputs.take_samples() == 8
    with pytest.raises(offbeat.SettingError, match=r"sync.samples\(len\(batch\)\)"):
        replica.inputs.take_samples()
