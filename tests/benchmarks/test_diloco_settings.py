"""DiLoCo's rule as benchmarks/strategies/diloco_settings.py implements it, compared with DiLoCo itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from benchmarks.strategies import diloco_settings
from benchmarks.strategies.diloco_settings import WORKERS, BatchedRuns, Settings

from offbeat import DiLoCo
from offbeat.experiments.job import Job
from offbeat.experiments.tasks import task
from offbeat.experiments.tasks.images import Images
from offbeat.experiments.virtual_run import simulate
from tests.support.virtual_runs import cluster_of

pytestmark = pytest.mark.virtual

STEPS, LOOK = 24, 6
# No two runs of a batch have the same rate, so that none can take another's for its own.
SETTINGS = [Settings(outer_lr=0.55), Settings(outer_lr=0.5, mix=0.5), Settings(outer_lr=0.6, average=0.7)]


@pytest.fixture(scope="module")
def data(data_folder: Path) -> Images:
    loaded = task("fashion-mnist", model="mlp").load(data_folder)
    assert isinstance(loaded, Images)
    return loaded


@pytest.fixture(scope="module")
def batched(data: Images) -> Callable[[int], list[list[float]]]:
    """Accuracies at every look, one list per setting, by the delay: one batch of runs for all settings."""

    @cache
    def accuracies(delay: int) -> list[list[float]]:
        runs = BatchedRuns(data, [5, 3], SETTINGS, 8, delay)
        looks = []
        for step in range(1, STEPS + 1):
            runs.step(step)
            if step % LOOK == 0:
                looks.append(runs.accuracy()[:, 1].tolist())
        return [list(values) for values in zip(*looks, strict=True)]

    return accuracies


@pytest.mark.parametrize("which", range(len(SETTINGS)))
@pytest.mark.parametrize("delay", [0, 3])
def test_it_goes_where_diloco_goes(
    data: Images,
    batched: Callable[[int], list[list[float]]],
    monkeypatch: pytest.MonkeyPatch,
    delay: int,
    which: int,
) -> None:
    monkeypatch.setattr(diloco_settings, "STEPS", STEPS)
    values, settings = batched(delay)[which], SETTINGS[which]
    problem = task("fashion-mnist", model="mlp", batch_size=diloco_settings.BATCH)
    outer = {"outer_lr": settings.outer_lr, "mix": settings.mix, "average": settings.average}
    strategy = DiLoCo(period=8, delay=delay, **outer)
    job = Job(task=problem, strategy=strategy, workers=WORKERS, seed=3, steps=STEPS, evaluate_every=LOOK)
    looks = [point.value for point in simulate(job, cluster_of(*[1.0] * WORKERS), data)]

    assert values == pytest.approx(looks, abs=2e-4)  # two pictures of 10,000, for another order of sums
    assert max(values) > 0.5  # of ten classes
