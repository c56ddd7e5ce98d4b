"""Pictures of the runs to the end: what is drawn is what the runs have."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from benchmarks.papers import trained_curves
from benchmarks.papers.runs import Cache
from benchmarks.papers.trained_curves import Axis, Point, curve_of, picture
from benchmarks.papers.trained_runs import CONTENDERS, MODELS, run_of


def _add(cache: Cache, name: str, seed: int, values: Sequence[float | None], model: str = "resnet18") -> None:
    run = run_of(model, CONTENDERS[name], seed)
    steps = [run.steps * (number + 1) // len(values) for number in range(len(values))]
    history = [{"step": step, "value": value} for step, value in zip(steps, values, strict=True)]
    cache.add(run, {"history": history})


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    cache = Cache(tmp_path)
    _add(cache, "BSP", 0, [0.5, 0.9])
    _add(cache, "BSP", 1, [0.7, 0.94])
    _add(cache, "SelSync, δ 0.1", 0, [0.6, 0.92])
    _add(cache, "SelSync, δ 0.1, twice as long", 0, [0.6, 0.95])
    return cache


def test_a_point_has_the_mean_error_of_the_seeds_and_its_range(cache: Cache) -> None:
    curve = curve_of("resnet18", "BSP", CONTENDERS["BSP"], cache)
    assert curve is not None and curve.seeds == 2
    assert curve.points == [pytest.approx(Point(15, 30, 40, 50)), pytest.approx(Point(30, 6, 8, 10))]
    assert curve_of("resnet18", "OSP", CONTENDERS["OSP"], cache) is None


def test_scores_that_are_no_accuracies_are_drawn_as_they_are_and_nan_is_left_out(cache: Cache) -> None:
    _add(cache, "BSP", 0, [None, math.nan, 27.5], "seq2seq")
    curve = curve_of("seq2seq", "BSP", CONTENDERS["BSP"], cache)
    assert curve is not None and curve.points == [Point(MODELS["seq2seq"].epochs, 27.5, 27.5, 27.5)]


def test_a_picture_has_bsp_s_line_and_each_contender_s_as_long_as_it_trained(cache: Cache) -> None:
    drawn = picture("selsync", cache)
    lines = re.findall(r'class="line" stroke="#\w+" d="M([\d. L]+)"', drawn)
    last = [float(line.split("L")[-1].split()[0]) for line in lines]
    right = trained_curves.WIDTH - trained_curves.RIGHT
    assert last == [(trained_curves.LEFT + right) / 2, (trained_curves.LEFT + right) / 2, right]
    assert drawn.count('class="band"') == 1, "BSP has two seeds, the others one"
    assert (
        "BSP, 2 seeds" in drawn and "SelSync, δ 0.1, twice as long, 1 seed" in drawn and "60 epochs" in drawn
    )
    assert picture("osp", cache) == "", "it has no run"


def test_better_is_lower_for_errors_and_an_axis_has_room_for_all(cache: Cache) -> None:
    heights = [Axis(1, 100, True).height(value) for value in (0.5, 1, 10, 100, 1000)]
    assert heights == pytest.approx([0, 0, 0.5, 1, 1])
    curves = [curve_of("resnet18", name, CONTENDERS[name], cache) for name in ("BSP", "SelSync, δ 0.1")]
    axis = trained_curves.axis_of("resnet18", [curve for curve in curves if curve])
    assert axis.low < 6 and axis.high > 50 and axis.ticks == [7, 10, 20, 30, 50]
    assert Axis(0, 28, False).ticks == [0, 5, 10, 15, 20, 25]


def test_colors_that_are_used_up_come_again_dashed() -> None:
    every = [trained_curves.ink(number) for number in range(len(CONTENDERS))]
    used = [sum(of.strategy == strategy for of in CONTENDERS.values()) for strategy in ("selsync", "gssp")]
    assert len(set(every[: max(used) + 1])) == max(used) + 1
