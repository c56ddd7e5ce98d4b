"""Output to the terminal: rich tables and bars, and plain lines without markup."""

from __future__ import annotations

from typing import Any

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Column, Table


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
        """Print a table; one that is too wide in parts below each other, each with the first column.

        Words may wrap, and so may the header of a column of numbers. No number is cut or wrapped.
        """
        for part in self._parts(table):
            spare = self.width - self._least_width(part)
            for column in part.columns:  # rich alone may give wrapped columns too much, and cut the last one
                least = self._least(column)
                column.width = least + max(0, min(spare, self._most(column) - least))
                spare -= column.width - least
            self.print(part)

    def _parts(self, table: Table) -> list[Table]:
        first, *others = range(len(table.columns))
        parts: list[list[int]] = [[first]]
        for column in others:
            wider = _with_columns(table, [*parts[-1], column])
            if len(parts[-1]) > 1 and self._least_width(wider) > self.width:
                parts.append([first])
            parts[-1].append(column)
        return [_with_columns(table, columns) for columns in parts]

    def _least_width(self, table: Table) -> int:
        gaps = (len(table.columns) - 1) * (table.padding[1] + table.padding[3])
        return sum(map(self._least, table.columns)) + gaps

    def _least(self, column: Column) -> int:
        """Return the width that a column needs: for whole lines, whole words, or as much as it asks for."""
        if column.no_wrap:
            return self._most(column)
        if column.overflow == "fold":
            return min(column.min_width or 1, self._most(column))
        numbers = column.justify == "right"
        cells = map(self._measure, column.cells)
        widths = (cell.maximum if numbers else cell.minimum for cell in cells)
        return max([self._measure(column.header).minimum, *widths])

    def _most(self, column: Column) -> int:
        return max(self._measure(cell).maximum for cell in (column.header, *column.cells))

    def _measure(self, cell: RenderableType) -> Measurement:
        return self.measure(cell, options=self.options.update(max_width=10_000))


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
