"""Evaluations of elastic workers: whose weights they show, and when. That they are free: conformance."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from offbeat import LocalSGD
from offbeat.worlds.virtual.cluster import Absence, Hang
from tests.conformance.test_looking import EQUAL, STEP_S
from tests.conformance.test_looking_elastic import STEPS, look_every

pytestmark = pytest.mark.virtual

ALONE = LocalSGD(period=STEPS)  # nothing is exchanged before the end
WHOLE = look_every(1, ALONE, EQUAL).seen


def test_a_mean_is_over_those_who_came_to_the_step() -> None:
    """Worker 1 dies in its sixth step, which the others do not find out before the end."""
    dead = Absence(worker=1, from_s=5.25 * STEP_S)
    left = look_every(1, ALONE, replace(EQUAL, away=(dead,))).seen
    same = [torch.equal(one, other) for one, other in zip(WHOLE, left, strict=True)]
    assert same == [True] * 5 + [False] * (STEPS - 5)


def test_an_evaluation_waits_for_a_worker_that_is_late() -> None:
    """Worker 1 is stopped in its sixth step, but not dropped; its weights of each step are in the mean."""
    hung = Hang(worker=1, from_s=5.25 * STEP_S, until_s=20 * STEP_S)
    run = look_every(1, ALONE, replace(EQUAL, hung=(hung,)))
    assert all(map(torch.equal, run.seen, WHOLE))
    seconds = [evaluation.seconds for evaluation in run.history]
    assert seconds[4] == pytest.approx(5 * STEP_S)
    assert seconds[5] == pytest.approx((6 + 14.75) * STEP_S)
