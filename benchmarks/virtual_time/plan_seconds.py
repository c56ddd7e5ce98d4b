"""The seconds of a real run of the benchmark plan, from what rank 0 logged."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from benchmarks.virtual_time.plan_cases import WARM_UP


def progress(seconds: Sequence[float], batches: Sequence[int]) -> list[dict[str, Any]]:
    """Return the steps that all workers have done, on average, at the end of each step of rank 0.

    `batches` are those of each worker at the end. Where work is shared, the number of a batch is no measure:
    workers claim batches before they do them. So all are taken to do their parts evenly.
    """
    part = sum(batches) / len(batches) / len(seconds)
    return [{"step": part * number, "seconds": each} for number, each in enumerate(seconds, 1)]


def seconds_at(step: float, history: list[dict[str, Any]]) -> float:
    """Return the seconds of a run at a step, on a line between its points; after the last, at its rate."""
    points = [(0.0, 0.0), *((point["step"], point["seconds"]) for point in history)]
    for (before, began), (after, ended) in pairwise(points):
        if step <= after:
            return float(began + (ended - began) * (step - before) / (after - before))
    return float(points[-1][1] * step / points[-1][0])


def start_seconds(seconds: Sequence[float]) -> float:
    """Return how much longer the first steps took than as many usual ones; `seconds` are those at their ends.

    The median of the later steps is usual: a step with an exchange in it is not, where most have none.
    """
    later = [after - before for before, after in pairwise(seconds[WARM_UP - 1 :])]
    return max(0.0, seconds[WARM_UP - 1] - WARM_UP * statistics.median(later)) if later else 0.0
