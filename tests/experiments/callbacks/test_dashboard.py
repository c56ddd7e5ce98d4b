"""The live page in a real browser: it follows a run, names the straggler, and says when it has ended."""

from __future__ import annotations

from typing import Any

import pytest

from offbeat.experiments.loop import Evaluation
from tests.support.chromium import Browser
from tests.support.dashboard_stage import Stage
from tests.support.limits import HANG_S

pytestmark = pytest.mark.browser


def until(browser: Browser, condition: str) -> None:
    """Wait in the page, which is told by events, until it shows what it should."""
    watch = f"""new Promise((found, late) => {{
        const look = () => ({condition}) ? found(true) : requestAnimationFrame(look);
        setTimeout(() => late(new Error(document.body.innerText)), {1000 * HANG_S});
        look();
    }})"""
    assert browser.run(watch)


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
    stage.dashboard.closed()
    until(browser, f"{shown('status')} === 'Training has ended.'")
    assert browser.complaints == []
    assert all(
        address.startswith(stage.dashboard.url) for address in browser.requests if "data:" not in address
    )
