"""The report in a real browser: it renders, its controls work, its console is silent, on any screen."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.chromium import Browser
from tests.support.commands import command
from tests.support.run_folders import EVIL, run_folder

pytestmark = pytest.mark.browser

LABELS = ["bsp", "local_sgd", "ssp"]


@pytest.fixture
def page(browser: Browser, compared: Path) -> Browser:
    browser.be(1200)
    browser.open((compared / "report.html").as_uri())
    return browser


def lines(page: Browser) -> list[str]:
    found: list[str] = page.run("[...document.querySelectorAll('#course .line')].map(l => l.dataset.label)")
    return found


def text(page: Browser, selector: str) -> str:
    found: str = page.run(f"document.querySelector({json.dumps(selector)}).textContent")
    return found


def address(page: Browser) -> str:
    found: str = page.run("location.hash")
    return found


def test_every_part_is_drawn_from_what_was_measured(page: Browser, compared: Path) -> None:
    runs = json.loads((compared / "summary.json").read_text())
    assert lines(page) == LABELS
    rows = page.run("[...document.querySelectorAll('#table tbody tr')].map(r => r.innerText)")
    names = [row.split()[0] for row in rows]
    assert sorted(names) == LABELS
    mean = sum(run["value"] for run in runs if run["strategy"] == "bsp") / 2
    assert f"{mean:.4f}" in rows[names.index("bsp")], "as the terminal writes it"
    assert page.run("document.querySelectorAll('#split .worker').length") == 3 * 3
    assert page.run("document.querySelectorAll('#timeline rect.computing').length") > 24
    assert page.run("document.querySelectorAll('#timeline rect.waiting').length") > 0
    told = page.run("[...document.querySelectorAll('#decisions text')].map(t => t.textContent)")
    assert "local_sgd: 13% of 24 steps" in told
    assert text(page, "#staleness").startswith("ssp")
    made_by = "offbeat compare quadratic --strategies 'bsp,local_sgd(weighted=true),ssp'"
    assert text(page, "#origin pre").startswith(made_by)
    assert "torch" in text(page, "#origin")
    assert page.complaints == []
    assert page.run("document.querySelector('.error')") is None


def test_only_settings_that_are_not_the_defaults_are_shown(page: Browser) -> None:
    small = "[...document.querySelectorAll('#table tbody th small')].map(s => s.textContent)"
    assert sorted(page.run(small)) == ["", "", "weighted=true"]
    rows = "[...document.querySelectorAll('#table tbody th')]"
    full = f"{rows}.find(h => h.textContent.includes('weighted')).title"
    assert page.run(full) == "codec=none period=8 weighted=true first_moments=none second_moments=none"
    opened = "[...document.querySelectorAll('#origin details')].map(d => d.open)"
    assert page.run(opened) == [False, False, False]
    page.click("#origin details:nth-of-type(2) summary")
    assert page.run(opened) == [False, True, False]
    assert (
        text(page, "#origin details:nth-of-type(2) dl")
        == "codecnoneperiod8weightedtruefirst_momentsnonesecond_momentsnone"
    )
    shown = page.run("[...document.querySelectorAll('#origin dd')].map(d => d.textContent)")
    assert [text for text in shown if text in ("defaults", "weighted=true")] == [
        "defaults",
        "weighted=true",
        "defaults",
    ]
    assert page.complaints == []


def test_it_asks_no_network(page: Browser, compared: Path) -> None:
    assert page.requests == [(compared / "report.html").as_uri()]


def test_the_axes_are_chosen_by_mouse(page: Browser) -> None:
    ticks = "[...document.querySelectorAll('#course text')].map(t => t.textContent).join('|')"
    assert "seconds of training" in page.run(ticks)
    page.click("#x label:nth-child(2)")
    assert "bytes sent by workers and server" in page.run(ticks)
    assert "kB" in page.run(ticks)
    page.click("#x label:nth-child(3)")
    assert "steps per worker" in page.run(ticks)
    page.click("#y label:nth-child(2)")
    assert "training loss" in page.run(ticks)
    assert address(page) == "#x=steps&y=loss"
    assert page.complaints == []


def test_a_scale_is_chosen(page: Browser) -> None:
    drawn = "document.querySelector('#course .line').getAttribute('d')"
    before = page.run(drawn)
    page.click('[data-of="log y"]')
    up = page.run(drawn)
    page.click('[data-of="log x"]')
    assert len({before, up, page.run(drawn)}) == 3
    assert address(page) == "#logx=1&logy=1"
    page.click('[data-of="log y"]')
    page.click('[data-of="log x"]')
    assert page.run(drawn) == before
    assert address(page) == ""


def test_strategies_are_chosen(page: Browser) -> None:
    page.click('[data-of="bsp"]')
    assert lines(page) == ["local_sgd", "ssp"]
    assert page.run("document.querySelectorAll('#split .worker').length") == 2 * 3
    assert address(page) == "#hide=bsp"
    for name in ("local_sgd", "ssp"):
        page.click(f'[data-of="{name}"]')
    assert "Nothing to show" in text(page, "#course")
    page.click('[data-of="bsp"]')
    assert lines(page) == ["bsp"]
    assert page.complaints == []


def test_each_seed_can_be_seen(page: Browser) -> None:
    assert page.run("document.querySelectorAll('#course .seed').length") == 0
    page.click('[data-of="each seed"]')
    assert page.run("document.querySelectorAll('#course .seed').length") == 2 * 3


def test_the_timeline_is_chosen_and_zoomed(page: Browser) -> None:
    wide = "document.querySelector('#timeline svg').getBoundingClientRect().width"
    before = page.run(wide)
    choose = "(s, v) => { s.value = v; s.dispatchEvent(new Event('change')); }"
    page.run(f"({choose})(document.getElementById('zoom'), '4')")
    assert page.run(wide) == pytest.approx(4 * before)
    key = "[...document.querySelectorAll('#timeline-key span')].map(s => s.textContent)"
    assert page.run(key) == ["computing", "waiting", "communicating", "evaluating"]
    page.run(f"({choose})(document.getElementById('timeline-of'), 'ssp')")
    assert address(page) == "#timeline=ssp&zoom=4"
    to_and_fro = ["pushing to the server", "pulling from the server"]
    assert page.run(key) == ["computing", "waiting", *to_and_fro, "evaluating"]
    drawn = "k => document.querySelectorAll(`#timeline rect.${k}`).length"
    assert page.run(f"['push', 'pull', 'communicating'].map({drawn})") == [3 * 24, 3 * 24, 0]
    fills = "k => getComputedStyle(document.querySelector(`#timeline rect.${k}`)).fill"
    kinds = ["computing", "waiting", "push", "pull", "evaluating"]
    colours = {"rgb(0, 0, 0)", *page.run(f"{json.dumps(kinds)}.map({fills})")}
    assert len(colours) == 1 + len(kinds), "each its own, and none is black for want of one"
    assert page.complaints == []


def test_a_link_shows_the_same_view(page: Browser, compared: Path) -> None:
    page.open((compared / "report.html").as_uri() + "#x=bytes&logx=1&hide=ssp&timeline=local_sgd&zoom=2")
    assert page.run("document.getElementById('course').dataset.x") == "bytes"
    assert lines(page) == ["bsp", "local_sgd"]
    checked = "[...document.querySelectorAll('#controls :checked')].map(i => i.value + i.dataset.of)"
    assert "bytesundefined" in page.run(checked)
    assert page.run("document.getElementById('timeline-of').value") == "local_sgd"
    page.open((compared / "report.html").as_uri() + "#x=parsecs&hide=nobody&zoom=1e9&timeline=")
    assert lines(page) == LABELS
    assert page.complaints == []


def test_numbers_are_read_by_pointer_and_by_keys(page: Browser) -> None:
    page.run("document.querySelector('#course svg').scrollIntoView({block: 'center'})")
    x, y, width, height = page.run(
        "(({x, y, width, height}) => [x, y, width, height])"
        "(document.querySelector('#course svg').getBoundingClientRect())"
    )
    page.move(x + width / 2, y + height / 2)
    pointed = text(page, "#tip")
    assert all(label in pointed for label in LABELS)
    page.move(x + width / 2, y - 30)
    assert page.run("document.getElementById('tip').hidden")
    page.run("document.querySelector('#course svg').focus()")
    page.press("ArrowRight")
    first = text(page, "#tip")
    page.press("ArrowRight")
    page.press("ArrowRight")
    page.press("ArrowRight")
    assert text(page, "#tip") != first
    page.press("ArrowLeft")
    page.press("ArrowLeft")
    page.press("ArrowLeft")
    assert text(page, "#tip") == first


def test_a_chart_is_a_picture_of_its_own(page: Browser, tmp_path: Path) -> None:
    picture = page.run("standalone(document.querySelector('#course svg'), courseSeries())")
    root = ElementTree.fromstring(picture)
    words = {node.text for node in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {*LABELS, "seconds of training"} <= words
    assert "var(" not in picture
    (tmp_path / "chart.svg").write_text(picture)
    page.open((tmp_path / "chart.svg").as_uri())
    assert page.run("document.querySelectorAll('path').length") >= 3
    assert page.complaints == []


def test_saving_a_chart_complains_of_nothing(page: Browser, tmp_path: Path) -> None:
    page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    page.click("#save")
    assert page.run("new Promise((next) => requestAnimationFrame(() => next(1)))") == 1
    assert page.complaints == []


def contrast(page: Browser) -> float:
    """Of the text against the page, as WCAG counts it."""
    ratio: float = page.run(
        """(() => {
        const of = (c) => c.match(/[0-9.]+/g).slice(0, 3).map(v => v / 255)
            .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
            .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
        const html = getComputedStyle(document.documentElement).backgroundColor;
        const soft = getComputedStyle(document.querySelector('.hint')).color;
        const [a, b] = [of(html), of(soft)].sort((p, q) => q - p);
        return (a + 0.05) / (b + 0.05);
    })()"""
    )
    return ratio


def background(page: Browser) -> str:
    found: str = page.run("getComputedStyle(document.documentElement).backgroundColor")
    return found


def test_light_and_dark_as_preferred_and_by_the_button(browser: Browser, compared: Path) -> None:
    seen = {}
    for scheme in ("light", "dark"):
        browser.be(1200, scheme=scheme)
        browser.open((compared / "report.html").as_uri())
        seen[scheme] = background(browser)
        assert contrast(browser) >= 4.5
    assert seen["light"] != seen["dark"]
    browser.click("#theme")
    assert background(browser) == seen["light"]
    browser.click("#theme")
    assert background(browser) == seen["dark"]
    assert browser.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_scrolling_sideways(browser: Browser, compared: Path, scheme: str) -> None:
    browser.be(390, 844, scheme)
    browser.open((compared / "report.html").as_uri())
    assert browser.run("document.documentElement.scrollWidth") == 390
    words = "[...document.querySelectorAll('body *')].filter(e => !e.children.length && e.textContent.trim())"
    smallest = browser.run(f"Math.min(...{words}.map(e => parseFloat(getComputedStyle(e).fontSize)))")
    assert smallest >= 11.5
    controls = "[...document.querySelectorAll('button, select, .segments span, .pick label')]"
    lowest = browser.run(f"Math.min(...{controls}.map(e => e.getBoundingClientRect().height))")
    assert lowest >= 32, "fingers are wide"
    assert lines(browser) == LABELS
    assert browser.complaints == []


# --- names that would break out of the page, numbers that are none


def test_names_cannot_break_out(browser: Browser, tmp_path: Path) -> None:
    run_folder(tmp_path, strategy=EVIL, settings={EVIL: EVIL}, task=EVIL, metric=EVIL, cluster=EVIL)
    details = {"command": EVIL, "started": EVIL, "environment": {EVIL: EVIL}}
    (tmp_path / "details.json").write_text(json.dumps(details))
    assert command("report", tmp_path).code == 0
    browser.be(1200)
    browser.open((tmp_path / "report.html").as_uri())
    assert browser.run("document.title").startswith("</script>")
    assert text(browser, "#title").count("</script>") == 4
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.complaints == []


def test_runs_without_details_or_with_nothing_measured(browser: Browser, tmp_path: Path) -> None:
    point = {"step": 2, "seconds": 1.5, "loss": None, "value": None}
    for name, changed in {
        "old": {},
        "diverged": {"strategy": "ssp", "value": None, "best": None, "history": [point]},
        "stopped": {"strategy": "asp", "complete": False, "history": [], "per_worker": [], "steps": 0},
    }.items():
        run_folder(tmp_path / name, **changed)
    folders = [tmp_path / name for name in ("old", "diverged", "stopped")]
    assert command("report", *folders, "--out", tmp_path / "page.html").code == 0
    browser.be(1200)
    browser.open((tmp_path / "page.html").as_uri())
    assert "incomplete: asp" in text(browser, "#notes")
    assert "No timeline" in text(browser, "#timeline")
    for view in ("#x=bytes", "#y=loss&logy=1", "#logx=1&logy=1&seeds=1"):
        browser.open((tmp_path / "page.html").as_uri() + view)
        assert browser.complaints == []
        assert browser.run("document.querySelector('.error')") is None
