"""The command line: one file per command. Also as `python -m offbeat`."""

from __future__ import annotations

import sys

import typer
from rich.markup import escape

from offbeat.cli.calibrate import calibrate_command
from offbeat.cli.compare import compare_command
from offbeat.cli.data import data_command
from offbeat.cli.list import list_command
from offbeat.cli.plan import plan_command
from offbeat.cli.report import report_command
from offbeat.cli.serve import serve_command
from offbeat.cli.simulate import simulate_command
from offbeat.cli.terminal import Terminal
from offbeat.cli.train import train_command
from offbeat.errors import OffbeatError
from offbeat.experiments.tasks.files.locate import MissingData

app = typer.Typer(
    name="offbeat",
    help="Semi-synchronous data-parallel training for PyTorch.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("list")(list_command)
app.command("train")(train_command)
app.command("simulate")(simulate_command)
app.command("calibrate")(calibrate_command)
app.command("compare")(compare_command)
app.command("plan")(plan_command)
app.command("report")(report_command)
app.command("serve")(serve_command)
app.command("data")(data_command)


def main() -> None:
    """Run a command; a mistake of the user's gets a sentence, not a traceback."""
    try:
        app()
    except OffbeatError as error:
        message = f"[bold red]error:[/] {escape(str(error) + _advice(error))}"
        Terminal(stderr=True).print(message, soft_wrap=True)
        sys.exit(2)


def _advice(error: OffbeatError) -> str:
    """Name the options that help against an error."""
    if isinstance(error, MissingData):
        return (
            f" The option is --data DIR; `offbeat data {error.task} --data DIR --download` fetches what is"
            " missing."
        )
    return ""
