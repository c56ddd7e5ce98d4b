"""Whoever interrupts a run is told what has been saved of it."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest

from offbeat.cli.progress import report_interrupt
from offbeat.cli.terminal import Terminal


def told(*files: Path, writes: str = "", error: type[BaseException] = KeyboardInterrupt) -> str:
    said = StringIO()
    with pytest.raises(error), report_interrupt(Terminal(file=said, width=30), *files):
        for name in writes.split():
            (files[0].parent / name).write_text("{}")
        raise error
    return said.getvalue()


def test_what_was_written_is_named(tmp_path: Path) -> None:
    one, two, never = (tmp_path / name for name in ("summary.json", "report.html", "never.json"))
    assert told(one, two, never, writes="summary.json report.html") == (
        f"interrupted: results so far are in {one} and {two}\n"
    )


def test_what_lay_there_before_is_not_of_this_run(tmp_path: Path) -> None:
    old = tmp_path / "summary.json"
    assert told(old) == "interrupted: there are no results yet\n"
    old.write_text("{}")
    assert told(old) == "interrupted: there are no results yet\n"


def test_other_errors_speak_for_themselves(tmp_path: Path) -> None:
    assert told(tmp_path / "summary.json", writes="summary.json", error=ValueError) == ""
