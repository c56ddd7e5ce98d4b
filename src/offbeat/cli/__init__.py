"""The command line, also as `python -m offbeat`: one file per command."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable

import typer
from rich.markup import escape

from offbeat.cli.calibrate import calibrate_command
from offbeat.cli.compare import compare_command
from offbeat.cli.data import data_command
from offbeat.cli.list import list_command
from offbeat.cli.plan import plan_command
from offbeat.cli.rendezvous import rendezvous_command
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
COMMANDS: dict[str, Callable[..., None]] = {
    "list": list_command,
    "train": train_command,
    "simulate": simulate_command,
    "calibrate": calibrate_command,
    "compare": compare_command,
    "plan": plan_command,
    "report": report_command,
    "serve": serve_command,
    "rendezvous": rendezvous_command,
    "data": data_command,
}


def _help(command: Callable[..., None]) -> str:
    """Return a command's docstring with one line per paragraph, for the terminal to wrap."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)


for name, function in COMMANDS.items():
    app.command(name, help=_help(function))(function)


def main() -> None:
    """Run a command; print an OffbeatError as a sentence, without a traceback."""
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
