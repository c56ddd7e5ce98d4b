"""DSSP against an independent reading of its rule, and what the rule does if it is read to the letter."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from offbeat import DSSP
from offbeat.experiments.loop import seed_step
from offbeat.experiments.tasks.base import Batch
from offbeat.worlds.virtual.cluster import Cluster, ServerMachines, Workers
from tests.support.dssp_reference import FREE_PUSH, GRANTED_ANEW, LETTER, TIES_BY_ROUNDING, Reading
from tests.support.rules import of_clocks, pushed
from tests.support.virtual_runs import Kept, play

pytestmark = pytest.mark.virtual

FAST = {"up_bits_per_s": 1e15, "down_bits_per_s": 1e15}  # an exchange takes some 1e-11 s
STEPS = 25
BOUNDS = [(3, 15), (1, 6), (0, 4), (2, 2)]


def seconds(step_s: list[float], low: int, high: int, steps: int) -> float:
    """Return when the first worker has made its steps, in virtual time."""
    workers = tuple(Workers(step_s=s, **FAST) for s in step_s)
    cluster = Cluster(workers=workers, server=ServerMachines(**FAST))
    run = play(cluster, DSSP(low=low, high=high, overlap=False), steps)
    return min(ledger.seconds for ledger in run.ledgers)


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.integers(10, 99), min_size=2, max_size=4, unique=True),
    st.sampled_from(BOUNDS),
)
@example([10, 37], (1, 6))
@example([10, 37], (0, 4))
@example([10, 10.013, 23, 41], (1, 6))
def test_all_go_on_when_the_other_reading_does(hundredths: list[float], bounds: tuple[int, int]) -> None:
    step_s = [n * 0.01 + k * 1.7e-4 for k, n in enumerate(hundredths)]  # no two end at once
    reading = Reading(step_s, *bounds).run(STEPS)
    assert seconds(step_s, *bounds, steps=STEPS) == pytest.approx(reading.ended_s, abs=1e-6)
    assert reading.largest_gap <= bounds[1]


@pytest.mark.parametrize(("low", "high"), [(1, 6), (0, 4)])
def test_to_the_letter_the_upper_bound_does_not_hold(low: int, high: int) -> None:
    """A worker nine times faster: a free push at each request, and high − low more each time."""
    step_s = [0.1, 0.9003]
    letter = frozenset({FREE_PUSH, GRANTED_ANEW})
    ours, literal = (Reading(step_s, low, high, read).run(60) for read in (frozenset(), letter))
    assert ours.largest_gap == high
    assert literal.largest_gap > high


def test_ties_are_broken_by_the_fewest_whatever_rounding_says() -> None:
    """Both push every second, 0.3 s apart: every credit from 1 on is as near, up to rounding."""
    for error in (0.0, 1e-12, -1e-12, 3e-9):
        rule = DSSP(low=1, high=13, overlap=False).rule()
        state = of_clocks(rule, 11, 10)
        state.times = {0: (9.3, 10.3 + error), 1: (10.0, 11.0)}
        assert pushed(rule, state, 0, 12, 11.3)
        assert state.credit[0] == 0, "one granted, and spent"


def test_the_last_of_the_slowest_to_push_is_waited_for() -> None:
    """Workers 1 and 2 are both two behind; due at 10.2 s and 13.1 s. After three steps p is at 13 s."""
    for order in ((1, 2), (2, 1)):
        rule = DSSP(low=1, high=9, overlap=False).rule()
        state = of_clocks(rule, 11, 10, 10)
        state.times = {0: (8.0, 9.0), order[0]: (9.8, 10.0), order[1]: (6.9, 10.0)}
        assert pushed(rule, state, 0, 12, 10.0)
        assert state.credit[0] == 2, "three granted, one spent"


# --- what is trained


@dataclass(frozen=True, kw_only=True)
class Traced(Kept):
    """The quadratic task, and the weights at which each worker has computed gradients."""

    dimension: int = 50
    lr: float = 0.2
    at: dict[int, list[Tensor]] = field(default_factory=dict, compare=False)  # by the model's identity

    def gradient(self, model: nn.Module, batch: Batch) -> Tensor:
        self.at.setdefault(id(model), []).append(next(model.parameters()).detach().clone())
        return super().gradient(model, batch)

    def paths(self) -> list[list[Tensor]]:
        """Return the weights of each worker's gradients."""
        return [self.at[id(model)] for model in self.built]


def trained(step_s: list[float], low: int, high: int) -> list[list[Tensor]]:
    """Train with DSSP in virtual time; return the weights of each worker's gradients."""
    task = Traced()
    workers = tuple(Workers(step_s=s, **FAST) for s in step_s)
    cluster = Cluster(workers=workers, server=ServerMachines(**FAST))
    play(cluster, DSSP(low=low, high=high, overlap=False), STEPS, task=task)
    return task.paths()


def replayed(reading: Reading) -> list[list[Tensor]]:
    """Train by the pushes and pulls of a reading, without a server."""
    task, world = Traced(), len(reading.step_s)
    models = [task.build() for _ in range(world)]
    held = next(models[0].parameters()).detach().clone()
    batch = task.load().batch(torch.arange(task.batch_size))
    for what, worker in reading.events:
        (weight,) = models[worker].parameters()
        if what == "pull":
            weight.data.copy_(held)
            continue
        weight.grad = None
        seed_step(0, worker, len(task.at.get(id(models[worker]), [])) + 1)
        with torch.no_grad():
            task.gradient(models[worker], batch)
            assert weight.grad is not None
            held -= task.lr * weight.grad / world
    return task.paths()


def furthest(one: list[list[Tensor]], other: list[list[Tensor]]) -> float:
    """Return the largest difference of a weight at a step that both have made."""
    pairs = [pair for own, others in zip(one, other, strict=True) for pair in zip(own, others, strict=False)]
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize(("low", "high"), [(1, 6), (0, 4)])
def test_weights_deviate_from_the_letter_by_the_choices_that_are_ours_and_by_nothing_else(
    low: int, high: int
) -> None:
    """With all four choices an independent training has our weights; without any one of three, others."""
    step_s = [0.1, 0.1317, 0.2719, 0.9003]
    ours = trained(step_s, low, high)

    def apart(letter: frozenset[str]) -> float:
        return furthest(ours, replayed(Reading(step_s, low, high, letter).run(STEPS)))

    assert apart(frozenset()) < 1e-6
    assert apart(LETTER) > 1e-2
    for choice in (FREE_PUSH, GRANTED_ANEW, TIES_BY_ROUNDING):  # who is the slowest is open seldom
        assert apart(frozenset({choice})) > 1e-2, choice
