"""offbeat report: make one page from the folders of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli import options
from offbeat.cli.terminal import Terminal


def report_command(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR…", help="The --out of train, simulate or compare.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="The page to write. \\[default: report.html in the first DIR]"
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite an existing page.")] = False,
) -> None:
    """Make one self-contained page from finished runs. Runs that differ only in their seed are averaged."""
    from offbeat.cli.tables import comparison_table
    from offbeat.experiments.report.aggregate import grouped, remarks
    from offbeat.experiments.report.load import load_all
    from offbeat.experiments.report.page import write_page
    from offbeat.experiments.report.verdict import by_time_to_target, losses, verdict

    out = out or folders[0] / "report.html"
    options.check_new_file(out, force)
    write_page(out, folders)
    console = Terminal()
    groups = by_time_to_target(grouped(load_all(folders)))
    console.show(comparison_table(groups))
    for remark in [*remarks(groups), *losses(groups).values()]:
        console.warn(remark)
    if sentence := verdict(groups):
        console.tell(sentence, style="bold")
    console.say(f"written: {out}")
