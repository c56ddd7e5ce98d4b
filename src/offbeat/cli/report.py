"""offbeat report: make one page from the folders of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli import options
from offbeat.cli.tables import comparison_table
from offbeat.cli.terminal import Terminal
from offbeat.experiments.report.aggregate import grouped, remarks
from offbeat.experiments.report.load import load_all
from offbeat.experiments.report.page import write_page


def report_command(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR…", help="The --out of train, simulate or compare.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="The page to write. \\[default: report.html in the first DIR]")
    ] = None,
    force: Annotated[bool, typer.Option(help="Overwrite an existing page.")] = False,
) -> None:
    """Make one self-contained page from finished runs. Runs that differ only in their seed are averaged."""
    out = out or folders[0] / "report.html"
    options.check_new_file(out, force)
    write_page(out, folders)
    console = Terminal()
    groups = grouped(load_all(folders))
    console.print(comparison_table(groups))
    for remark in remarks(groups):
        console.warn(remark)
    console.say(f"written: {out}")
