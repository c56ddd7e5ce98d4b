"""Result tables: a benchmark's rows, with the command and the machine that produced them."""

from __future__ import annotations

import os
import platform
import shlex
import statistics
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch

from benchmarks.catalog import RESULTS

FOLDER_OPTIONS = {"--data", "--out", "--traces"}  # their values mean nothing on another machine


class Table:
    """Markdown table of one result; prints each row as it comes and writes the file at the end.

    `variant` tells results of one day apart: `results/peers/2026-11-16-search.md` has the variant "search".
    """

    def __init__(self, benchmark: str, question: str, columns: Sequence[str], variant: str = "") -> None:
        self.benchmark = benchmark
        self.variant = variant
        self.question = question.strip()
        self.columns = columns
        self.rows: list[Sequence[str]] = []
        self.notes: list[str] = []
        self.verdict = ""  # a sentence below the title
        self.machine = ""  # where the rows were measured; "": on this machine

    @property
    def path(self) -> Path:
        suffix = f"-{self.variant}" if self.variant else ""
        return RESULTS / self.benchmark / f"{date.today()}{suffix}.md"

    def note(self, text: str) -> None:
        """Print a line and write it above the table."""
        print(text, flush=True)
        self.notes.append(text)

    def row(self, *cells: str) -> None:
        """Print a row and add it to the table."""
        self.rows.append(cells)
        print("  ".join(f"{c}: {v}" for c, v in zip(self.columns, cells, strict=True)), flush=True)

    def write(self) -> Path:
        """Write the table to `benchmarks/results/NAME/DATE.md`."""
        title = f"{self.benchmark}, {self.variant}" if self.variant else self.benchmark
        lines = [f"# {title}, {date.today()}", ""]
        lines += [f"**Verdict**: {self.verdict}", ""] if self.verdict else []
        lines += [self.question, ""]
        where = self.machine or machine()
        lines += [f"Made by `{command_line(sys.argv[1:])}` on one machine: {where}.", ""]
        lines += [f"- {note}" for note in self.notes]
        lines += ["", f"| {' | '.join(self.columns)} |", f"|{'---|' * len(self.columns)}"]
        lines += [f"| {' | '.join(row)} |" for row in self.rows]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text("\n".join(lines) + "\n")
        new.replace(self.path)  # an interrupted run leaves a whole table
        print(f"written: {self.path}; add a line for it to {RESULTS / 'README.md'}", flush=True)
        return self.path


def command_line(arguments: Sequence[str]) -> str:
    """Return the command that a user types, with FOLDER for the folders of this machine."""
    shown = list(arguments)
    for place, argument in enumerate(shown):
        name, equals, _ = argument.partition("=")
        if name in FOLDER_OPTIONS and equals:
            shown[place] = f"{name}=FOLDER"
        elif name in FOLDER_OPTIONS and place + 1 < len(shown):
            shown[place + 1] = "FOLDER"
    return f"python -m benchmarks {shlex.join(shown)}"


def machine() -> str:
    """Describe this machine in words."""
    python, library = platform.python_version(), torch.__version__
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {python}, torch {library}"


def interval(values: Sequence[float]) -> str:
    """Format the first and third quartile."""
    low, _, high = statistics.quantiles(values, n=4)
    return f"{low:.3f} – {high:.3f}"


def spread(values: Sequence[float], digits: int, scale: float = 1.0) -> str:
    """Format the mean, with the lowest and the highest value in brackets if there are several."""
    low, mean, high = (scale * value for value in (min(values), statistics.mean(values), max(values)))
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ({low:.{digits}f} – {high:.{digits}f})"
