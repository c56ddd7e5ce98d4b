"""The settings of a training run: its length, and the samples that each worker draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offbeat import ASP, BSP, DSSP, GSSP, OSP, SSDSGD, SSP, DiLoCo, LocalSGD, Oscars
from offbeat.errors import SettingError
from offbeat.experiments.job import Job
from offbeat.experiments.planner.ranking import label_of
from offbeat.experiments.tasks import task
from tests.support.virtual_runs import Kept, cluster_of, play

pytestmark = pytest.mark.virtual


def test_more_workers_than_samples_is_told_before_anything_is_built() -> None:
    task = Kept(samples=3)
    with pytest.raises(SettingError, match="4 workers, but only 3 samples"):
        play(cluster_of(*[0.1] * 4), BSP(), 2, task=task)
    assert not task.built


def job(name: str = "digits", **settings: Any) -> Job:
    return Job(task=task(name, batch_size=10, epochs=3), strategy=BSP(), **{"workers": 4, **settings})


def test_the_length_is_steps_or_epochs_or_the_tasks() -> None:
    assert job().steps_per_epoch(400) == 10
    assert job().total_steps(400) == 30, "the task's epochs"
    assert job(epochs=5).total_steps(400) == 50
    assert job(epochs=5, steps=7).total_steps(400) == 7


def test_workers_draw_every_sample_once_per_epoch() -> None:
    chosen = job(seed=3)
    data = chosen.task.load()
    steps = chosen.steps_per_epoch(len(data))
    orders = [chosen.batches(data, rank, 10) for rank in range(4)]
    seen = torch.cat([next(order) for order in orders for _ in range(steps)])
    assert len(seen.unique()) == len(seen) == 4 * 10 * steps


def test_skewed_chunks_hold_few_classes() -> None:
    chosen = job(order="defdp", skew=3)
    data = chosen.task.load()
    assert data.labels is not None
    orders = [chosen.batches(data, rank, 10) for rank in range(4)]
    for order in orders:
        drawn = torch.cat([next(order) for _ in range(chosen.steps_per_epoch(len(data)))])
        assert len(data.labels[drawn].unique()) <= 3


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"workers": 0}, "workers=0: a whole number of workers, at least 1"),
        ({"seed": 1 << 63}, "a whole number of at most 63 bits"),
        ({"order": "seldb"}, "unknown order 'seldb'; did you mean 'seldp'?"),
        ({"skew": 2}, "skewed chunks need a data order that has chunks: seldp or defdp"),
        ({"inject": (0.5, 2.0)}, "a fraction from 0 to 1"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_run_is_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingError) as refused:
        job(**settings)
    assert problem in str(refused.value)


def test_samples_without_classes_cannot_be_skewed() -> None:
    chosen = job("quadratic", order="seldp", skew=2)
    with pytest.raises(SettingError, match="quadratic has no classes to skew its samples by"):
        chosen.batches(chosen.task.load(), 0, 4)


SHARING = [
    *(ASP(), SSP(), DSSP(), GSSP(), Oscars()),
    *(DiLoCo(on="server", quorum=3), DiLoCo(on="server", grace_s=1.0)),
]


@pytest.mark.parametrize("strategy", SHARING, ids=label_of)
def test_work_is_shared_where_workers_do_not_move_in_step(strategy: Any) -> None:
    def made(**options: Any) -> Job:
        return Job(task=task("digits"), strategy=strategy, workers=4, **options)

    assert made().shares_work
    assert not made(work="equal").shares_work
    for divided in ({"order": "defdp"}, {"order": "seldp", "skew": 3}, {"inject": (0.5, 0.5)}):
        assert not made(**divided).shares_work
        with pytest.raises(SettingError, match=r"work=shared is not possible: .* Choose equal"):
            made(work="shared", **divided)


@pytest.mark.parametrize(
    "strategy",
    [BSP(), LocalSGD(), DiLoCo(), DiLoCo(on="server"), OSP(on="server"), SSDSGD(on="server")],
    ids=label_of,
)
def test_work_is_equal_where_workers_move_in_step(strategy: Any) -> None:
    assert not Job(task=task("digits"), strategy=strategy, workers=4).shares_work
    with pytest.raises(SettingError, match=f"under {strategy.name} all workers do equally many steps"):
        Job(task=task("digits"), strategy=strategy, workers=4, work="shared")
