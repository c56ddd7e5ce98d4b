"""Output to the terminal: rich tables and bars, and plain lines without markup."""

from __future__ import annotations

from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table


class Terminal(Console):
    """A rich console that does not colour numbers. `say` and `warn` print brackets as they are."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(highlight=False, **settings)

    def say(self, text: str, style: str | None = None) -> None:
        """Print a line without wrapping it: a path or a command in it can be copied."""
        self.print(text, style=style, markup=False, soft_wrap=True)

    def tell(self, text: str, style: str | None = None) -> None:
        """Print sentences, wrapped between words; in a file or a pipe, as one line that can be searched."""
        self.print(text, style=style, markup=False, soft_wrap=not self.is_terminal)

    def warn(self, text: str) -> None:
        """Print sentences in yellow, wrapped between words."""
        self.tell(text, style="yellow")

    def show(self, table: Table) -> None:
        """Print a table; one that is too wide in parts below each other, each with the first column."""
        for column in table.columns:
            if column.no_wrap:  # rich takes the longest word for its least width
                column.min_width = max(map(self._width_of, (column.header, *column.cells)))
        for part in self._parts(table):
            self.print(part)

    def _width_of(self, cell: RenderableType) -> int:
        return self.measure(cell, options=self.options.update(max_width=10_000)).maximum

    def _parts(self, table: Table) -> list[Table]:
        if self._fits(table):
            return [table]
        first, *others = range(len(table.columns))
        parts: list[list[int]] = [[first]]
        for column in others:
            if len(parts[-1]) > 1 and not self._fits(_with_columns(table, [*parts[-1], column])):
                parts.append([first])
            parts[-1].append(column)
        return [_with_columns(table, columns) for columns in parts]

    def _fits(self, table: Table) -> bool:
        return self.measure(table, options=self.options.update(max_width=10_000)).minimum <= self.width


def _with_columns(table: Table, columns: list[int]) -> Table:
    """Return a copy of a table that has these columns only."""
    part = Table(box=table.box, pad_edge=table.pad_edge, padding=table.padding)
    kept = [table.columns[index] for index in columns]
    for column in kept:
        part.add_column(
            column.header,
            justify=column.justify,
            no_wrap=column.no_wrap,
            min_width=column.min_width,
            overflow=column.overflow,
        )
    for cells in zip(*(column.cells for column in kept), strict=True):
        part.add_row(*cells)
    return part


def say(text: str) -> None:
    """Print a line. Unlike a method, this function can be pickled for another process."""
    Terminal().say(text)


def say_nothing(text: str) -> None:
    """Print nothing: the other `say`, for --quiet."""
