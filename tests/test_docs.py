"""Check the documentation: every relative link points at a file and a heading, every strategy has a page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.strategies import STRATEGIES

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
FENCE = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
HEADING = re.compile(r"^#{1,6}[ \t]+(.+?)[ \t]*#*$", re.MULTILINE)
EXPLICIT_ID = re.compile(r"<a\s+(?:id|name)=\"([^\"]+)\"")
NAMED_TEST = re.compile(r"`(?:tests/)?([\w/]+\.py)::(\w+)`")
ABSOLUTE = re.compile(r"^[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def find_links(text: str) -> list[str]:
    """Return the relative targets of all links and images, without those in code."""
    prose = CODE.sub("", FENCE.sub("", text))
    return [target for target in LINK.findall(prose) if not ABSOLUTE.match(target)]


def find_anchors(text: str) -> set[str]:
    """Return the anchors of a page: its headings as GitHub writes them, and explicit ids."""
    prose = FENCE.sub("", text)
    anchors = set(EXPLICIT_ID.findall(prose))
    for heading in HEADING.findall(prose):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        count = 0
        while (anchor := f"{slug}-{count}" if count else slug) in anchors:
            count += 1
        anchors.add(anchor)
    return anchors


def find_broken_links(page: Path, root: Path) -> Iterator[str]:
    """Yield a sentence for each relative link of `page` that leads nowhere or out of `root`."""
    for link in find_links(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.is_relative_to(root):
            yield f"{link}: outside of the repository"
        elif not target.exists():
            yield f"{link}: no such file"
        elif anchor and (target.suffix != ".md" or anchor not in find_anchors(target.read_text("utf-8"))):
            yield f"{link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_point_at_files_and_headings(page: Path) -> None:
    assert list(find_broken_links(page, ROOT)) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# Other\n\n## What `run` does\n\n## Twice\n\n## Twice\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n\n[file](other.md) [heading](other.md#what-run-does)\n"
        "[second](other.md#twice-1) [here](#page)\n"
        "[away](https://example.org/none.md) `[code](none.md)`\n\n```\n[fenced](none.md)\n```\n\n"
        "[a](missing.md) ![b](missing.svg) [c](other.md#nothing) [d](#nothing) [e](../../outside.md)\n"
    )
    assert list(find_broken_links(page, tmp_path)) == [
        "missing.md: no such file",
        "missing.svg: no such file",
        "other.md#nothing: no such heading",
        "#nothing: no such heading",
        "../../outside.md: outside of the repository",
    ]


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategy_has_a_page(name: str) -> None:
    page = ROOT / "docs" / "strategies" / f"{name}.md"
    assert page.is_file(), f"write {page.relative_to(ROOT)}"
    assert f"strategies/{name}.md" in (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tests_that_pages_name_exist(page: Path) -> None:
    for path, name in NAMED_TEST.findall(page.read_text(encoding="utf-8")):
        assert f"def {name}(" in (ROOT / "tests" / path).read_text(encoding="utf-8"), f"{path}::{name}"
