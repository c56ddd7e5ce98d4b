"""A step ends when all optimizers were called in it, and not before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offbeat.integrations.calls import OptimizerCalls


class Steps:
    """In the place of a Sync: steps that end by themselves, or because they are told to."""

    def __init__(self) -> None:
        self.clock = 0
        self.ended = 0

    def end_step(self) -> None:
        self.clock += 1
        self.ended += 1


@pytest.fixture
def pair() -> tuple[Any, Any]:
    return tuple(torch.optim.SGD([torch.zeros(1)], lr=0.1) for _ in range(2))


def calls_of(count: int) -> tuple[Steps, OptimizerCalls]:
    steps: Any = Steps()
    return steps, OptimizerCalls(steps, count)


def test_last_of_two_that_are_skipped_ends_the_step(pair: tuple[Any, Any]) -> None:
    steps, calls = calls_of(2)
    for number in range(1, 4):
        with calls.of(pair[0]):
            pass
        assert steps.ended == number - 1
        with calls.of(pair[1]):
            pass
        assert steps.ended == number


def test_step_that_ended_by_itself_is_not_ended_again(pair: tuple[Any, Any]) -> None:
    steps, calls = calls_of(2)
    for _ in range(3):
        with calls.of(pair[0]):
            pass
        with calls.of(pair[1]):
            steps.clock += 1
    assert steps.ended == 0


def test_call_of_an_earlier_step_does_not_count(pair: tuple[Any, Any]) -> None:
    steps, calls = calls_of(2)
    with calls.of(pair[1]):  # alone: its step ends with the next forward
        pass
    steps.clock += 1
    with calls.of(pair[0]):
        pass
    assert steps.ended == 0
    with calls.of(pair[1]):
        pass
    assert steps.ended == 1


def test_one_optimizer_ends_its_step_after_a_call_that_ended_the_one_before(pair: tuple[Any, Any]) -> None:
    """A closure's forward may end the step before."""
    steps, calls = calls_of(1)
    with calls.of(pair[0]):
        steps.clock += 1
    assert steps.ended == 1
