"""What a summary says of value, best and target, whichever way is better."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from offbeat.experiments.job import Job
from offbeat.experiments.loop import Evaluation
from offbeat.experiments.summary import summarize
from offbeat.experiments.tasks.base import Task
from offbeat.experiments.tasks.digits import Digits
from offbeat.strategies.bsp import BSP


@dataclass(frozen=True, kw_only=True)
class Lower(Digits):
    metric: ClassVar[str] = "perplexity"
    higher_is_better: ClassVar[bool] = False


def summary(kind: type[Task], values: list[float], target: float | None = None) -> dict[str, Any]:
    job = Job(task=kind(), strategy=BSP(), workers=1, target=target)
    history = [Evaluation(step, 10.0 * step, 1.0, value) for step, value in enumerate(values, 1)]
    return summarize(job, "virtual", history, [], complete=True)


@pytest.mark.parametrize(
    ("kind", "values", "best"),
    [
        (Digits, [0.5, 0.9, 0.7], 0.9),
        (Lower, [90.0, 40.0, 55.0], 40.0),
        (Lower, [math.nan, 40.0, math.nan], 40.0),
        (Digits, [math.nan, 0.4], 0.4),
        (Lower, [math.inf, 40.0], 40.0),
        (Lower, [math.nan], None),
        (Lower, [], None),
    ],
)
def test_the_best_is_the_best_of_the_numbers(
    kind: type[Task], values: list[float], best: float | None
) -> None:
    said = summary(kind, values)
    assert said["best"] == best
    assert said["higher_is_better"] is kind.higher_is_better
    if values and not math.isnan(values[-1]):
        assert said["value"] == values[-1]


@pytest.mark.parametrize(
    ("kind", "values", "target", "seconds"),
    [
        (Digits, [0.5, 0.9, 0.7], 0.9, 20.0),
        (Digits, [0.5, 0.9, 0.95], 0.97, None),
        (Lower, [90.0, 40.0, 30.0], 40.0, 20.0),
        (Lower, [90.0, 50.0, 45.0], 40.0, None),
        (Lower, [30.0, 90.0], 40.0, 10.0),
        (Lower, [math.nan, 40.0], 40.0, 20.0),
    ],
)
def test_a_target_is_reached_from_its_own_side(
    kind: type[Task], values: list[float], target: float, seconds: float | None
) -> None:
    assert summary(kind, values, target)["seconds_to_target"] == seconds
