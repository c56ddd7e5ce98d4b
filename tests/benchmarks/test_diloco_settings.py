"""DiLoCo's rule as benchmarks/strategies/diloco_settings.py implements it, compared with DiLoCo itself."""

from __future__ import annotations

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

STEPS, LOOK = 40, 10


@pytest.fixture(scope="module")
def data(data_folder: Path) -> Images:
    loaded = task("fashion-mnist", model="mlp").load(data_folder)
    assert isinstance(loaded, Images)
    return loaded


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("mix", "average"), [(0.0, 0.0), (0.5, 0.0), (0.0, 0.7)])
@pytest.mark.parametrize("delay", [0, 3])
def test_it_goes_where_diloco_goes(
    data: Images, monkeypatch: pytest.MonkeyPatch, delay: int, mix: float, average: float
) -> None:
    monkeypatch.setattr(diloco_settings, "STEPS", STEPS)
    problem = task("fashion-mnist", model="mlp", batch_size=diloco_settings.BATCH)
    strategy = DiLoCo(period=8, outer_lr=0.55, delay=delay, mix=mix, average=average)
    job = Job(task=problem, strategy=strategy, workers=WORKERS, seed=3, steps=STEPS, evaluate_every=LOOK)
    looks = [point.value for point in simulate(job, cluster_of(*[1.0] * WORKERS), data)]

    settings = [Settings(outer_lr=0.1), Settings(outer_lr=0.55, mix=mix, average=average)]
    runs = BatchedRuns(data, [5, 3], settings, 8, delay)
    values = []
    for step in range(1, STEPS + 1):
        runs.step(step)
        if step % LOOK == 0:
            values.append(runs.accuracy()[1, 1].item())

    assert values == pytest.approx(looks, abs=2e-4)  # two pictures of 10,000, for another order of sums
    assert max(values) > 0.5  # of ten classes
