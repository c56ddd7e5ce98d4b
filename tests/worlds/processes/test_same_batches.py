"""Ranks that all train on the same samples are warned of it, once; all others are not."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch.distributed as dist
from torch import nn

import offbeat
from tests.support import loops
from tests.support.crew import Crew

pytestmark = pytest.mark.processes

STEPS = 5


class Heard(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def _trained(samples_of: Callable[[int], int], switched_off: bool = False) -> list[str]:
    """Train on the samples of this number; return what was said of samples."""
    model = loops.mlp(0)
    if switched_off:  # no gradient comes through the last layer
        model = nn.Sequential(model, nn.Linear(5, 5).requires_grad_(False))
        nn.init.zeros_(model[1].weight)
    optimizer = loops.sgd(model)
    heard = Heard()
    logging.getLogger("offbeat").addHandler(heard)
    try:
        with offbeat.attach(model, optimizer, offbeat.BSP()) as sync:
            loops.train(model, optimizer, loops.batches(samples_of(dist.get_rank()), STEPS))
            sync.settle()
    finally:
        logging.getLogger("offbeat").removeHandler(heard)
    return [text for text in heard.said if "samples" in text]


def _same(rank: int) -> int:
    return 0


def _own(rank: int) -> int:
    return rank


def test_same_samples_are_told_once(crew: Callable[[int], Crew]) -> None:
    first, *others = crew(3).run(_trained, _same)
    assert len(first) == 1
    assert "all 3 ranks" in first[0] and "DistributedSampler" in first[0]
    assert others == [[], []]


def test_own_samples_are_not(crew: Callable[[int], Crew]) -> None:
    assert crew(2).run(_trained, _own) == [[], []]


def test_gradients_of_zeros_say_nothing(crew: Callable[[int], Crew]) -> None:
    assert crew(2).run(_trained, _own, True) == [[], []]


def test_one_rank_has_nobody_to_compare_with(crew: Callable[[int], Crew]) -> None:
    assert crew(1).run(_trained, _same) == [[]]
