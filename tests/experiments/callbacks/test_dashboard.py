"""The dashboard: its snapshots, and its page in a real browser, which follows a run to the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from offbeat.experiments.callbacks.dashboard import EVERY_S, KEPT_MOMENTS, straggler
from offbeat.experiments.loop import Evaluation
from tests.support.chromium import Browser
from tests.support.commands import simulate
from tests.support.dashboard_stage import Stage
from tests.support.limits import HANG_S


def until(browser: Browser, condition: str) -> None:
    """Wait in the page, which is told by events, until it shows what it should."""
    watch = f"""new Promise((found, late) => {{
        const look = () => ({condition}) ? found(true) : requestAnimationFrame(look);
        setTimeout(() => late(new Error(document.body.innerText)), {1000 * HANG_S});
        look();
    }})"""
    assert browser.run(watch)


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "dark")])
def test_the_page_follows_a_run_to_its_end(browser: Browser, width: int, scheme: str) -> None:
    stage = Stage()
    browser.be(width, 844, scheme)
    browser.open(stage.dashboard.url)
    shown: Any = "document.getElementById('{}').textContent".format
    stage.go(10, 1.0, 3.0, 1.0, seconds=4.0)
    until(browser, f"{shown('straggler')} === 'Straggler: rank 1 on there'")
    assert browser.run("document.querySelectorAll('#table tbody tr').length") == 3
    assert "300 ms" in browser.run(shown("table"))
    stage.go(30, 3.0, 5.2, 3.0, seconds=8.0)
    until(browser, f"{shown('straggler')}.startsWith('No worker')")
    points = [Evaluation(20, 6.0, 0.6, 0.5), Evaluation(40, 10.0, 0.5, 0.75)]
    stage.dashboard.evaluated(points, stage.entries)
    until(browser, "document.querySelector('#course .line')")
    assert "0.75" in browser.run(shown("facts"))
    assert browser.run("document.getElementById('progress').value") == pytest.approx(0.4)
    assert browser.run("document.documentElement.scrollWidth") == width
    waits = "[...document.querySelectorAll('#waiting .line')].map(l => l.dataset.label)"
    assert browser.run(waits) == ["rank 0", "rank 1", "rank 2"]
    assert browser.run("document.querySelectorAll('#loss .line').length") == 1
    events = browser.run("[...document.querySelectorAll('#events li')].map(l => l.textContent)")
    assert events == ["8 s: no worker is slower any more", "4 s: rank 1 on there is slower than the others"]
    assert browser.run("[...document.querySelectorAll('#events li')].map(l => l.className)") == [
        "slow",
        "slow",
    ]
    assert browser.run("document.getElementById('no-events').hidden")
    stage.dashboard.closed()
    until(browser, f"{shown('status')} === 'Training has ended.'")
    assert browser.complaints == []
    assert all(
        address.startswith(stage.dashboard.url) for address in browser.requests if "data:" not in address
    )


def test_a_snapshot_tells_of_every_worker_and_names_the_straggler(stage: Stage) -> None:
    stage.go(10, 1.0, 3.0, 1.0, seconds=4.0)
    first = stage.state()
    workers = len(first["workers"])
    assert (first["bytes_sent"], first["bytes_total"]) == (10 * workers, 15 * workers)
    assert (first["step"], first["total_steps"], first["loss"]) == (10, 100, 0.25)
    assert first["straggler"] == "rank 1 on there"
    assert [w["name"] for w in first["workers"]] == ["rank 0 on here", "rank 1 on there", "rank 2"]
    assert [w["waiting"] for w in first["workers"]] == pytest.approx([0.75, 0.25, 0.75])
    assert [w["steps_per_s"] for w in first["workers"]] == pytest.approx([2.5] * 3)
    stage.go(30, 3.0, 5.2, 3.0, seconds=8.0)
    later = stage.state()
    assert later["straggler"] is None, "it has recovered: only lately counts"
    assert [w["steps_per_s"] for w in later["workers"]] == pytest.approx([5.0] * 3)


def test_it_looks_no_more_often_than_it_must(stage: Stage) -> None:
    for step in range(1, 20):
        stage.go(step, 0.1, 0.1, 0.1, seconds=1.0 + step * EVERY_S / 10)
    assert stage.looks == 2


@pytest.mark.virtual
def test_a_port_that_is_taken_is_told(stage: Stage, tmp_path: Path) -> None:
    port = stage.dashboard.url.rstrip("/").rpartition(":")[2]
    said = simulate(tmp_path, "--dashboard", "--dashboard-port", port)
    assert said.code == 2
    assert f"--dashboard-port {port} cannot be used" in said.err


@pytest.mark.virtual
def test_training_ends_though_a_page_is_open(tmp_path: Path) -> None:
    said = simulate(tmp_path, "--dashboard")
    assert said.code == 0, said.err
    assert "dashboard: http://127.0.0.1:" in said.out
    assert json.loads((tmp_path / "summary.json").read_text())["complete"]


@pytest.mark.parametrize(
    ("computes_s", "named"),
    [([0.1], None), ([0.1, 0.12], None), ([0.1, 0.2], "1"), ([0.3, 0.1, 0.1], "0"), ([0.0, 0.0], None)],
)
def test_a_straggler_is_named_only_if_it_stands_out(computes_s: list[float], named: str | None) -> None:
    assert straggler([{"name": str(n), "step_compute_s": c} for n, c in enumerate(computes_s)]) == named


def test_moments_have_the_waiting_since_the_moment_before(stage: Stage) -> None:
    stage.go(10, 1.0, 3.0, 1.0, seconds=4.0)
    stage.go(20, 5.0, 5.0, 1.0, seconds=8.0)
    first, second = stage.state()["moments"]
    assert (first["step"], first["seconds"], first["loss"]) == (10, 4.0, 0.25)
    assert first["waiting"] == {"0": 0.75, "1": 0.25, "2": 0.75}
    assert second["waiting"] == {"0": 0.0, "1": 0.5, "2": 1.0}
    assert stage.state()["left_s"] == pytest.approx(8.0 / 20 * 80)


def test_old_moments_are_thinned_out_and_the_last_stays(stage: Stage) -> None:
    for step in range(1, 1000):
        stage.go(step, step, step, step, seconds=float(step))
    moments = stage.state()["moments"]
    assert len(moments) <= KEPT_MOMENTS
    assert moments[0]["step"] == 1
    assert moments[-1]["step"] == 999
    assert [m["step"] for m in moments] == sorted({m["step"] for m in moments})
