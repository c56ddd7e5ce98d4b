"""What a person is told comes out as it was written."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.table import Table

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


def test_a_sentence_is_cut_between_words_and_no_number_is(narrow: Terminal) -> None:
    narrow.tell("local_sgd is faster; accuracy -0.28 points")
    assert [line.rstrip() for line in text(narrow).splitlines()] == [
        "local_sgd is faster;",
        "accuracy -0.28",
        "points",
    ]


def test_in_a_pipe_a_sentence_stays_one_line() -> None:
    pipe = Terminal(width=20, file=StringIO())
    pipe.tell("local_sgd is faster; accuracy -0.28 points")
    assert text(pipe) == "local_sgd is faster; accuracy -0.28 points\n"


def test_numbers_are_not_coloured(narrow: Terminal) -> None:
    narrow.print("rank 3: 4.20 ms")
    assert text(narrow) == "rank 3: 4.20 ms\n"


def table() -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("strategy", "seconds", "accuracy", "waiting"):
        table.add_column(column, no_wrap=True)
    table.add_row("bsp", "12.5", "0.9712", "34%")
    table.add_row("local_sgd", "2.5", "0.9733", "4%")
    return table


@pytest.mark.parametrize("width", [80, 60, 30, 20])
def test_no_column_and_no_cell_is_lost_at_any_width(width: int) -> None:
    terminal = Terminal(width=width, file=StringIO())
    terminal.show(table())
    words = text(terminal).split()
    cells = {str(cell) for column in table().columns for cell in [column.header, *column.cells]}
    assert cells <= set(words)
    assert all(len(line) <= width for line in text(terminal).splitlines())
    assert ("strategy" in words) and words.count("local_sgd") == words.count("strategy")
