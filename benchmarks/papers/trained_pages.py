"""Sections "Trained to the end" of the strategies' pages: rows of the newest table of `trained`, and curves.

    python -m benchmarks run trained --pages

writes them. A section begins with its heading, the sentence below it and the picture of its curves; its table
follows. What is written by hand comes after the table, and stays.
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.catalog import BENCHMARKS, RESULTS
from benchmarks.papers.runs import Cache
from benchmarks.papers.trained_curves import picture
from benchmarks.papers.trained_runs import CONTENDERS, WORKERS

FOLDER = RESULTS.parents[1] / "docs" / "strategies"
HEADING = "### Trained to the end"
SECTION = re.compile(rf"{HEADING}\n(?:(?:[^|\n].*)?\n)*(?:\|.*\n)+")
LEFT_OUT = "settings"  # of the table's columns; the contender's name says enough
PAGES = tuple(dict.fromkeys(contender.strategy for contender in CONTENDERS.values()))


def newest() -> tuple[str, list[dict[str, str]]]:
    """Return the path of the newest table, as pages link to it, and its rows by column."""
    path = BENCHMARKS["trained"].newest_result
    assert path is not None
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    names, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return f"../../benchmarks/results/trained/{path.name}", [
        dict(zip(names, row, strict=True)) for row in rows
    ]


def section(strategy: str) -> str:
    """Return the heading, the sentence and the table of a strategy; empty if it has no row."""
    link, rows = newest()
    own = [row for row in rows if CONTENDERS[row["contender"]].strategy == strategy]
    if not own:
        return ""
    names = [name for name in own[0] if name != LEFT_OUT]
    lines = [
        HEADING,
        "",
        f"{WORKERS} workers in virtual time, real data, a learning rate that falls to 0. Cells have the mean",
        "of the seeds, lowest and highest; ± is half of the 95% interval of a mean difference",
        f"(`python -m benchmarks run trained --data FOLDER --device cuda`, [settings and all rows]({link})).",
        "",
        f"![The scores of these runs and of BSP over the epochs]({picture_of(strategy).name})",
        "",
        f"| {' | '.join(names)} |",
        f"|{'---|' * len(names)}",
        *(f"| {' | '.join(row[name] for name in names)} |" for row in own),
    ]
    return "\n".join(lines) + "\n"


def refreshed(text: str, strategy: str) -> str:
    """Return a page's text with its section as the newest table has it; before "## Paper" if it is new."""
    new = section(strategy)
    if not new or SECTION.search(text):
        return SECTION.sub(lambda _: new, text)
    return text.replace("## Paper\n", f"{new}\n## Paper\n", 1)


def page_of(strategy: str) -> Path:
    return FOLDER / f"{strategy}.md"


def picture_of(strategy: str) -> Path:
    return FOLDER / f"{strategy}-trained.svg"


def write_pages(cache: Cache) -> None:
    """Refresh the section and the picture of every strategy that has a row."""
    for strategy in PAGES:
        page = page_of(strategy)
        files = {page: refreshed(page.read_text(encoding="utf-8"), strategy)}
        if section(strategy):
            files[picture_of(strategy)] = picture(strategy, cache)
        for path, new in files.items():
            if not path.exists() or path.read_text(encoding="utf-8") != new:
                path.write_text(new, encoding="utf-8")
                print(f"written: {path}", flush=True)
