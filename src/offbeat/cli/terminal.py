"""Words to a person at a terminal: rich for tables and bars, and plain lines as they are."""

from __future__ import annotations

from typing import Any

from rich.console import Console


class Terminal(Console):
    """Numbers are not coloured. What `say` and `warn` print is text, whatever brackets there are in it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(highlight=False, **settings)

    def say(self, text: str, style: str | None = None) -> None:
        """Never cut into lines: a path or a command may be in it, to be copied."""
        self.print(text, style=style, markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Sentences, cut between words."""
        self.print(text, style="yellow", markup=False)
