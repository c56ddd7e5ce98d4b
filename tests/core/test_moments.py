"""Moments of the training loop: what an awaiting strategy gets when one is fired."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offbeat.core.hidden_gradients import HiddenGradients
from offbeat.core.moments import Moment, StepMoment
from offbeat.core.pending import block_on
from offbeat.errors import OffbeatError


async def awaited(moment: Moment) -> bool:
    return await moment


@pytest.mark.parametrize("happened", [True, False])
def test_the_value_is_whether_the_optimizer_stepped(happened: bool) -> None:
    moment = Moment(StepMoment.AFTER_UPDATE)
    step = awaited(moment)
    assert step.send(None) is moment
    assert not moment.done()
    moment.fire(happened)
    assert moment.done()
    with pytest.raises(StopIteration) as ended:
        step.send(None)
    assert ended.value.value is happened


def test_gradients_stay_hidden_until_it_is_fired() -> None:
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.ones(2)
    moment = Moment(StepMoment.AFTER_UPDATE, HiddenGradients([param]))
    assert param.grad is None
    moment.fire(False)
    assert param.grad is not None


def test_no_one_can_wait_for_a_moment_that_only_the_loop_brings_about() -> None:
    with pytest.raises(OffbeatError, match="only the training loop can fire the moment BEFORE_UPDATE"):
        block_on(awaited(Moment(StepMoment.BEFORE_UPDATE)))


def test_moments_come_in_order() -> None:
    assert StepMoment.BEFORE_UPDATE < StepMoment.AFTER_UPDATE
