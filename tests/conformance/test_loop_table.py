"""docs/loops.md has the table that the tests run, and every refusal in it has its short words."""

from __future__ import annotations

from pathlib import Path

from offbeat.strategies import STRATEGIES
from tests.conformance.loop_kinds import LOOPS
from tests.conformance.loop_table import ROWS, table

PAGE = Path(__file__).parents[2] / "docs" / "loops.md"
BEGIN, END = "<!-- table: tests/conformance/loop_table.py -->\n", "\n<!-- end of the table -->"


def test_the_page_has_the_table_of_the_tests() -> None:
    text = PAGE.read_text()
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)] == table(), f"put this there:\n{table()}"


def test_every_strategy_has_a_row() -> None:
    assert {row.strategy.name for row in ROWS.values()} == set(STRATEGIES)


def test_every_exception_is_of_a_loop() -> None:
    for row in ROWS.values():
        assert {*row.refused, *row.differs} <= LOOPS.keys()
