"""The rule that benchmarks/diloco_settings.py writes out again, held against DiLoCo itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import diloco_settings
from benchmarks.diloco_settings import WORKERS, Many, Settings

from offbeat import DiLoCo
from offbeat.tasks import task
from offbeat.tasks.images import Images
from offbeat.train import Job
from offbeat.worlds.virtual import simulate
from tests.virtual.test_closed_forms import cluster_of

STEPS, LOOK = 40, 10


@pytest.mark.parametrize(("delay", "mix", "average"), [(0, 0.0, 0.0), (3, 0.5, 0.7)])
def test_it_goes_where_diloco_goes(
    data_folder: Path, monkeypatch: pytest.MonkeyPatch, delay: int, mix: float, average: float
) -> None:
    monkeypatch.setattr(diloco_settings, "STEPS", STEPS)
    problem = task("fashion-mnist", model="mlp", batch_size=diloco_settings.BATCH)
    data = problem.load(data_folder)
    assert isinstance(data, Images)
    strategy = DiLoCo(period=8, outer_lr=0.55, delay=delay, mix=mix, average=average)
    job = Job(task=problem, strategy=strategy, workers=WORKERS, seed=3, steps=STEPS, evaluate_every=LOOK)
    looks = [point.value for point in simulate(job, cluster_of(*[1.0] * WORKERS), data)]

    settings = [Settings(outer_lr=0.1), Settings(outer_lr=0.55, mix=mix, average=average)]
    many = Many(data, [5, 3], settings, 8, delay)
    values = []
    for step in range(1, STEPS + 1):
        many.step(step)
        if step % LOOK == 0:
            values.append(many.accuracy()[1, 1].item())

    assert values == pytest.approx(looks, abs=2e-4)  # two pictures of 10,000, for another order of sums
    assert max(values) > 0.5  # of ten classes
