"""Speed-ups by K/C: timed steps have their closed forms, and a figure is found where the curve passes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.papers import speedups
from benchmarks.papers.speedups import ALIKE, ALWAYS, BSP, SERVED, SERVED_BSP, Method, Setting, groups
from benchmarks.support import tables

FOUR = Setting("4 workers", (1.0,) * 4)
OSP, SSD_SGD = ("osp", ("growth=0",)), ("ssd_sgd", ("warmup=2",))


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speedups, "STEPS", 12)
    monkeypatch.setattr(speedups, "FIRST", 6)
    monkeypatch.setattr(speedups.Kept, "cache", None)


@pytest.mark.virtual
@pytest.mark.parametrize(
    ("method", "setting", "ratio", "expected"),
    [
        (BSP, FOUR, 0.5, 2 / 3 + 4 / 3 / 12 + 11 * 4 / 3 / 12 + 1 / 12),  # hidden but for the last layer
        (
            BSP,
            FOUR,
            2.0,
            0.5 / 3 + 1 / 3 / 12 + 1,
        ),  # busy from the first layer's gradients on
        (ALWAYS, FOUR, 2.0, 0.5 + 1),
        (SSD_SGD, FOUR, 1.0, 1),
        (SSD_SGD, FOUR, 2.0, 0.7),  # (1 + 2/k)/2 of K: weights and momentum every fifth step
        (SERVED_BSP, Setting("4 and a server", (1.0,) * 4, served=True), 1.0, 3),  # all push, then all pull
    ],
)
def test_a_step_takes_what_its_closed_form_says(
    method: Method, setting: Setting, ratio: float, expected: float
) -> None:
    assert speedups.step_s(method, setting, ratio) == pytest.approx(expected, rel=2e-3)


@pytest.mark.virtual
def test_a_step_of_selsync_is_local_in_the_stated_fraction() -> None:
    assert speedups.mixed(0.75)(FOUR, 1.0) == pytest.approx(1 + 0.25)


@pytest.mark.virtual
def test_a_local_step_of_selsync_waits_for_the_slowest_flag() -> None:
    straggler = Setting("one takes twice as long", (1.0, 1.0, 1.0, 2.0))
    assert speedups.step_s(speedups.NEVER, straggler, 1.0) == pytest.approx(2, rel=1e-3)


@pytest.mark.virtual
def test_gssp_adds_the_speeds_of_its_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speedups, "STEPS", 24)
    assert groups(2).slowness[::2] == pytest.approx((1, 4 / 3, 5 / 3, 2))
    speeds = sum(1 / slowness for slowness in groups(2).slowness) / 8
    assert speedups.step_s(("gssp", ()), groups(2), 1e-3) == pytest.approx(1e3 / speeds, rel=0.1)


def test_a_figure_comes_out_where_the_curve_passes_it() -> None:
    gains = [1.0, 1.25, 1.75, 1.5, 1.5, 1.0, 1.0, 1.0]
    assert speedups.crossing(gains, 1.5) == "K/C 0.75 to 2"
    assert speedups.crossing(gains, 1.0) == "K/C 0.25 or less and more"
    assert speedups.crossing(gains[::-1], 1.6) == "K/C 2.8 to 5.2"
    assert speedups.crossing(gains, 1.8) == "not here: at most 1.75, at K/C 1"


def test_every_paper_has_rows_and_its_own_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def limit(method: Method, setting: Setting, ratio: float) -> float:
        k, c = speedups.K_S, speedups.K_S / ratio
        times = {BSP: max(c, c / 3 + k), ALWAYS: c + k, SERVED_BSP: c + 2 * k, speedups.NEVER: c}
        return times.get(method, max(c, 0.7 * k))

    timed: list[speedups.Timing] = []

    def measured(timing: speedups.Timing) -> float:
        timed.append(timing)
        return limit(timing.method, timing.setting, timing.ratio)

    monkeypatch.setattr(speedups, "measured", measured)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    command = ["--out", str(tmp_path / "kept"), "--only", "SelSync", "SSD-SGD"]
    for _ in range(2):
        speedups.main(command)
        assert len(timed) == len(set(timed)), "nothing is timed twice"
    (path,) = (tmp_path / "speedups").glob("*-some.md")
    written = path.read_text()
    assert "| SSD-SGD | 8 workers, alike | 1.00 / 1.25 | 1.00 / 1.50 | 1.33 / 2.00 |" in written
    assert "| 2.1x | 2.1x: not here: at most 1.75, at K/C 1.5 / K/C 1.1 to 2.2 |" in written
    assert "| 6.16x | 6.16x: K/C 13 and more / K/C 12 and more |" in written
    figures = {row.paper: row.figures for row in speedups.rows()}
    assert figures == {"OSP": (1.5,), "SSD-SGD": (2.1,), "SelSync": (2.42,), "GSSP": (1.46, 2.2)}
    assert {row.setting for row in speedups.rows()} >= {ALIKE, SERVED, groups(5.0)}
