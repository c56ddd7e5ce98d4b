"""Tables: what a benchmark prints and keeps, with the command and the machine that made it."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


class Table:
    """Rows in Markdown; each is printed as it comes, the whole is written in the end."""

    def __init__(self, name: str, question: str, columns: Sequence[str]) -> None:
        self.name = name
        self.question = question.strip()
        self.columns = columns
        self.rows: list[Sequence[str]] = []
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        print(text, flush=True)
        self.notes.append(text)

    def row(self, *cells: str) -> None:
        self.rows.append(cells)
        print("  ".join(f"{c}: {v}" for c, v in zip(self.columns, cells, strict=True)), flush=True)

    def write(self) -> Path:
        script = Path(sys.argv[0])
        module = script.parent if script.stem == "__main__" else script.with_suffix("")
        command = f"python -m {module.parent.name}.{module.name} {' '.join(sys.argv[1:])}"
        lines = [f"# {self.name}, {date.today()}", "", self.question, ""]
        lines += [f"Made by `{command.strip()}` on one machine: {machine()}.", ""]
        lines += [f"- {note}" for note in self.notes]
        lines += ["", f"| {' | '.join(self.columns)} |", f"|{'---|' * len(self.columns)}"]
        lines += [f"| {' | '.join(row)} |" for row in self.rows]
        path = RESULTS / f"{date.today()}-{self.name}.md"
        path.write_text("\n".join(lines) + "\n")
        print(f"written: {path}", flush=True)
        return path


def machine() -> str:
    """This one, in words."""
    python, library = platform.python_version(), torch.__version__
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {python}, torch {library}"


def interval(values: Sequence[float]) -> str:
    """The middle half of the values."""
    low, _, high = statistics.quantiles(values, n=4)
    return f"{low:.3f} – {high:.3f}"
