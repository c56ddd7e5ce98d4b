"""What a person is told comes out as it was written."""

from __future__ import annotations

from io import StringIO

import pytest

from offbeat.cli.terminal import Terminal

LONG = "written: /a/very/long/folder [1, 2]/summary 0.123.json; try: offbeat train --from [bold]this[/]"


@pytest.fixture
def narrow() -> Terminal:
    return Terminal(width=20, file=StringIO(), force_terminal=True, color_system="standard")


def text(terminal: Terminal) -> str:
    assert isinstance(terminal.file, StringIO)
    return terminal.file.getvalue()


def test_a_line_stays_one_and_brackets_stay(narrow: Terminal) -> None:
    narrow.say(LONG)
    assert text(narrow) == LONG + "\n"


def test_a_style_colours_the_whole(narrow: Terminal) -> None:
    narrow.say(LONG, style="yellow")
    assert text(narrow) == f"\x1b[33m{LONG}\x1b[0m\n"


def test_a_warning_is_cut_between_words(narrow: Terminal) -> None:
    narrow.warn("links are emulated [by 2 hosts]: no other traffic")
    lines = text(narrow).replace("\x1b[33m", "").replace("\x1b[0m", "").splitlines()
    assert [line.rstrip() for line in lines] == ["links are emulated", "[by 2 hosts]: no", "other traffic"]


def test_numbers_are_not_coloured(narrow: Terminal) -> None:
    narrow.print("rank 3: 4.20 ms")
    assert text(narrow) == "rank 3: 4.20 ms\n"
