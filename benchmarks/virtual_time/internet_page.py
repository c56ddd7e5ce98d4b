"""Sections of docs/internet.md: what became of so many workers, as the benchmark internet found it.

A section begins with its heading and ends before the next one. Nothing in it is written by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.catalog import RESULTS
from offbeat.core.files import write_atomic

PAGE = RESULTS.parents[1] / "docs" / "internet.md"
BEFORE = "## What is not in these figures\n"  # a new section comes before this one
TARGET, FATE, TASK = "to the target", "what becomes of it", "task"


def heading(workers: int) -> str:
    return f"## What became of {workers:,} workers"


def section(
    workers: int,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str],
    result: Path,
    options: str = "",
) -> str:
    """Return a section: what lives and what reaches the target, in words, and a table of each task.

    `options` are those of the command that made the result.
    """
    link = f"../benchmarks/results/{result.parent.name}/{result.name}"
    lines = [heading(workers), ""]
    lines += [f"`python -m benchmarks run internet{options}` ([the result]({link})). {' '.join(notes)}"]
    found = [dict(zip(columns, row, strict=True)) for row in rows]
    for task in dict.fromkeys(row[TASK] for row in found):
        own = [row for row in found if row[TASK] == task]
        reach = [row for row in own if row[TARGET] != "–"]
        live = [row for row in own if row[FATE] == "lives" and row not in reach]
        names = [column for column in columns if column != TASK]
        lines += ["", f"On `{task}` the target is reached by {_names(reach)}. "]
        lines[-1] += f"{_names(live)} live, but do not reach it. " if live else ""
        lines[-1] += f"The other {len(own) - len(reach) - len(live)} do not live."
        lines += ["", f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
        lines += [f"| {' | '.join(row[name] for name in names)} |" for row in own]
    return "\n".join(lines) + "\n"


def _names(rows: Sequence[dict[str, str]]) -> str:
    return ", ".join(f"`{row['strategy']}` ({row['how']})" for row in rows) or "none"


def refreshed(text: str, new: str) -> str:
    """Return the page's text with a section that replaces the one with the same heading."""
    title = new.partition("\n")[0] + "\n"
    if title not in text:
        return text.replace(BEFORE, f"{new}\n{BEFORE}", 1)
    before, _, rest = text.partition(title)
    after = rest[rest.index("\n## ") + 1 :] if "\n## " in rest else ""
    return f"{before}{new}\n{after}" if after else before + new


def write_section(
    workers: int,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str],
    result: Path,
    options: str = "",
) -> Path:
    """Write the section into the page."""
    text = PAGE.read_text(encoding="utf-8")
    return write_atomic(PAGE, refreshed(text, section(workers, columns, rows, notes, result, options)))
