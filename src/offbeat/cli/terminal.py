"""Output to the terminal: rich tables and bars, and plain lines without markup."""

from __future__ import annotations

from typing import Any

from rich.console import Console


class Terminal(Console):
    """A rich console that does not colour numbers. `say` and `warn` print brackets as they are."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(highlight=False, **settings)

    def say(self, text: str, style: str | None = None) -> None:
        """Print a line without wrapping it: a path or a command in it can be copied."""
        self.print(text, style=style, markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print sentences in yellow, wrapped between words."""
        self.print(text, style="yellow", markup=False)


def say(text: str) -> None:
    """Print a line. Unlike a method, this function can be pickled for another process."""
    Terminal().say(text)
