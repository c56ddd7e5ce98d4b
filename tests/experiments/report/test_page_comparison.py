"""The report's comparison with BSP in a real browser: verdict, order, colours, units, labels, zoom, phone."""

from __future__ import annotations

import json
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from offbeat.experiments.report.load import load_all
from offbeat.experiments.report.page import COLORED, color_of, page, write_page
from offbeat.strategies import STRATEGIES
from tests.support.chromium import Browser
from tests.support.run_folders import run_folder

pytestmark = pytest.mark.browser

CELLS = (
    "[...document.querySelectorAll('#table tbody tr')].map(r => [...r.cells].map(c => c.innerText.trim()))"
)
HEADS = "[...document.querySelectorAll('#table thead th')].map(h => h.textContent)"


def history(*points: tuple[int, float, float]) -> list[dict[str, Any]]:
    return [{"step": s, "seconds": t, "loss": 1.0, "value": v, "bytes_sent": 10**6 * s} for s, t, v in points]


RUNS = {
    "bsp": {"seconds": 30.0, "seconds_to_target": 20.0, "bytes_to_target": 2 * 10**9, "value": 0.96},
    "local_sgd": {"seconds": 8.0, "seconds_to_target": 0.5, "bytes_to_target": 2 * 10**8, "value": 0.968},
    "ssp": {"seconds": 60.0, "seconds_to_target": 40.0, "bytes_to_target": 10**9, "value": 0.95},
    "asp": {"seconds": 20.0, "seconds_to_target": None, "bytes_to_target": None, "value": 0.90},
}
TIMES = {"bsp": (10.0, 20.0), "local_sgd": (0.25, 0.5), "ssp": (20.0, 40.0), "asp": (10.0, 20.0)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("against_bsp")
    for name, known in RUNS.items():
        for seed in (0, 1):
            early, late = TIMES[name]
            points = history((1, early, 0.5), (2, late, 0.955 if name != "asp" else 0.9))
            more = {"target": 0.95, "strategy": name, "seed": seed, "steps": 2, "history": points}
            run_folder(out / f"{name}-{seed}", **{**known, **more, "value": known["value"] + 0.002 * seed})
    write_page(out / "report.html", [out / f"{name}-{seed}" for name in RUNS for seed in (0, 1)])
    return out


@pytest.fixture
def shown(browser: Browser, folder: Path) -> Browser:
    browser.be(1200)
    browser.open((folder / "report.html").as_uri())
    assert browser.complaints == []
    return browser


def test_a_verdict_is_the_first_sentence(shown: Browser) -> None:
    said = shown.run("document.getElementById('verdict').textContent")
    assert said == (
        "local_sgd reaches 0.95 40x faster than bsp (± 0) with 10% of the bytes; "
        "accuracy +0.8 ± 0 points, 2 seeds."
    )
    assert shown.run("document.getElementById('verdict').getBoundingClientRect().bottom") < 300


def test_rows_are_sorted_and_a_column_has_one_unit(shown: Browser) -> None:
    rows = shown.run(CELLS)
    heads = shown.run(HEADS)
    assert [row[0].split()[0] for row in rows] == ["local_sgd", "bsp", "ssp", "asp"]
    assert heads[1:5] == ["s to 0.95", "GB to 0.95", "x BSP", "Δ accuracy, points"]
    column = [row[1].split()[0] for row in rows]
    assert column == ["0.5", "20", "40", "never"]
    assert [row[2].split()[0] for row in rows] == ["0.2", "2", "1", "never"]
    assert [row[3].split()[0] for row in rows] == ["40x", "1x", "0.5x", "–"]
    assert [row[4].split()[0] for row in rows] == ["+0.8", "0", "−1", "−6"]
    assert "± 0" in rows[0][4]


def test_a_strategy_that_loses_is_told_with_the_reason(shown: Browser) -> None:
    told = shown.run("[...document.querySelectorAll('#losses li')].map(l => l.textContent)")
    assert [text.split()[0] for text in told] == ["ssp", "asp"]
    assert "a step takes 2.0x as long (waiting 33% of the time)" in told[0]
    assert "does not reach 0.95" in told[1]


def test_a_strategy_has_one_colour_in_every_report(browser: Browser, folder: Path, tmp_path: Path) -> None:
    stroke = "getComputedStyle(document.querySelector('#course .line[data-label=ssp]')).stroke"
    browser.be(1200)
    browser.open((folder / "report.html").as_uri())
    among_four = browser.run(stroke)
    write_page(tmp_path / "report.html", [folder / "ssp-0"])
    browser.open((tmp_path / "report.html").as_uri())
    assert browser.run(stroke) == among_four
    own = [color_of(name) for name in STRATEGIES.own if name in COLORED]
    assert len(own) == len(set(own))
    assert 0 <= color_of("a plugin") < len(COLORED)


def test_lines_have_their_names_at_their_ends(shown: Browser) -> None:
    ends = shown.run(
        "[...document.querySelectorAll('#course .end')].map(t => [t.textContent, +t.getAttribute('y')])"
    )
    assert sorted(name for name, _ in ends) == sorted(RUNS)
    heights = sorted(y for _, y in ends)
    assert all(b - a >= 12.9 for a, b in pairwise(heights)), "none covers another"


def test_zoom_shows_what_is_near_the_target(shown: Browser, folder: Path) -> None:
    ticks = "[...document.querySelectorAll('#course text')].map(t => t.textContent)"
    before = shown.run(ticks)
    shown.click('[data-of="zoom to target"]')
    assert shown.run("location.hash") == "#near=1"
    assert shown.run(ticks) != before
    assert shown.complaints == []


def test_time_is_drawn_against_accuracy(shown: Browser) -> None:
    dots = "[...document.querySelectorAll('#scatter circle')].map(c => c.dataset.label)"
    assert sorted(shown.run(dots)) == ["bsp", "local_sgd", "ssp"]
    assert "never reached: asp" in shown.run("document.getElementById('scatter-hint').textContent")
    circles = "[...document.querySelectorAll('#scatter circle')]"
    at = dict(shown.run(f"{circles}.map(c => [c.dataset.label, +c.getAttribute('cx')])"))
    assert at["local_sgd"] < at["bsp"] < at["ssp"]


def test_names_of_dots_that_are_close_do_not_cover_each_other(browser: Browser, tmp_path: Path) -> None:
    times = {"bsp": 20.0, "local_sgd": 5.0, "ssp": 6.0, "asp": 6.5, "oscars": 7.0, "diloco": 5.5}
    for name, seconds in times.items():
        known = {"seconds": 30.0, "seconds_to_target": seconds, "bytes_to_target": 10**6, "value": 0.96}
        more = {"target": 0.95, "strategy": name, "steps": 2, "history": history((1, 1.0, 0.5))}
        run_folder(tmp_path / name, **{**known, **more})
    write_page(tmp_path / "report.html", [tmp_path / name for name in times])
    browser.be(1200)
    browser.open((tmp_path / "report.html").as_uri())
    boxes = browser.run(
        f"[...document.querySelectorAll('#scatter text')].filter(t => {json.dumps(list(times))}"
        ".includes(t.textContent)).map(t => t.getBoundingClientRect())"
        ".map(b => [b.left, b.right, b.top, b.bottom])"
    )
    assert len(boxes) == len(times)
    for one, other in combinations(boxes, 2):
        apart = one[1] <= other[0] or other[1] <= one[0] or one[3] <= other[2] + 3 or other[3] <= one[2] + 3
        assert apart, (one, other)
    hint = browser.run("document.getElementById('scatter-hint').textContent")
    assert "Bars" not in hint, "one seed has no bars"


def test_on_a_phone_the_chart_is_on_the_first_screen(browser: Browser, folder: Path) -> None:
    browser.be(390, 844)
    browser.open((folder / "report.html").as_uri())
    assert browser.run("document.querySelector('#course svg').getBoundingClientRect().bottom") < 844
    assert browser.run("document.documentElement.scrollWidth") == 390


def test_without_bsp_there_is_no_column_against_it(folder: Path) -> None:
    text = page(load_all([folder / "ssp-0", folder / "asp-0"]))
    data = json.loads(text.split('type="application/json">')[1].split("</script>")[0])
    assert [group["versus"] for group in data["groups"]] == [None, None]
    assert data["losses"] == {}
