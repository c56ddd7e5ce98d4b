"""The command line, also as `python -m offbeat`: one file per command."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.markup import escape

from offbeat.cli.calibrate import calibrate_command
from offbeat.cli.compare import compare_command
from offbeat.cli.data import data_command
from offbeat.cli.help import SETTINGS, PlainCommand, PlainGroup, text_of
from offbeat.cli.list import list_command
from offbeat.cli.plan import plan_command
from offbeat.cli.rendezvous import rendezvous_command
from offbeat.cli.report import report_command
from offbeat.cli.serve import serve_command
from offbeat.cli.simulate import simulate_command
from offbeat.cli.terminal import Terminal
from offbeat.cli.train import train_command
from offbeat.errors import OffbeatError

app = typer.Typer(
    name="offbeat",
    help="Semi-synchronous data-parallel training for PyTorch.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    cls=PlainGroup,
    context_settings=SETTINGS,
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


def _load_torch_first(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command: while torch is imported, which takes seconds, the terminal says so."""

    @functools.wraps(command)
    def loaded(*args: Any, **options: Any) -> None:
        quiet = os.environ.get("RANK", "0") != "0" or "torch" in sys.modules
        with Terminal(stderr=True, quiet=quiet).status("loading PyTorch"):
            import torch  # noqa: F401
        command(*args, **options)

    return loaded


for name, function in COMMANDS.items():
    registered = app.command(name, help=text_of(function), cls=PlainCommand, context_settings=SETTINGS)
    registered(_load_torch_first(function))


def _show_version(wanted: bool) -> None:
    if wanted:
        import offbeat

        typer.echo(f"offbeat {offbeat.__version__}")
        raise typer.Exit


@app.callback()
def _general_options(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Semi-synchronous data-parallel training for PyTorch."""


def main() -> None:
    """Run a command; print an OffbeatError as a sentence, without a traceback."""
    try:
        app()
    except OffbeatError as error:
        message = f"[bold red]error:[/] {escape(str(error) + _advice(error))}"
        console = Terminal(stderr=True)
        console.print(message, soft_wrap=not console.is_terminal)
        sys.exit(2)


def _advice(error: OffbeatError) -> str:
    """Name the options that help against an error."""
    from offbeat.experiments.tasks.files.locate import MissingData

    if isinstance(error, MissingData):
        return (
            f" The option is --data DIR; `offbeat data {error.task} --data DIR --download` fetches what is"
            " missing."
        )
    return ""
