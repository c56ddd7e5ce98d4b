"""Help for people: one table of options in words, wrapped between words in any terminal; `-h` is `--help`.

Typer's own help gives the names of options as many columns as the longest needs, and cuts what is then too
long: at 60 columns `--evaluate-every` was shown as `--evaluate-…`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand, TyperGroup

from offbeat.cli.terminal import Terminal

SETTINGS = {"help_option_names": ["-h", "--help"]}
WIDEST = 100  # columns; longer lines are hard to read
IN_WORDS = {
    r"\\\[": "[",
    r"  \[": " [",
    r"x>=": "at least ",
    r"(\d+)<=x<=(\d+)": r"\1 to \2",
    r"(\d)\.0\]": r"\1]",
}


def text_of(command: Callable[..., None]) -> str:
    """Return a command's docstring with one line per paragraph, for the terminal to wrap."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)


class PlainCommand(TyperCommand):
    """A command whose help shows no types, and cuts nothing."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", *(each.metavar for each in _arguments(self.get_params(ctx)))]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _show_help(self, ctx, self.get_params(ctx), {})


class PlainGroup(TyperGroup):
    """A group of commands whose help shows no types, and cuts nothing."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        firsts = {name: str(each.help).partition("\n\n")[0] for name, each in self.commands.items()}
        _show_help(self, ctx, self.get_params(ctx), firsts)


def _without_types(parameters: list[Any]) -> list[Any]:
    """Remove the types that typer shows beside options that take no value."""
    for parameter in parameters:
        if parameter.param_type_name == "option" and parameter.is_flag:
            parameter.metavar = ""
    return parameters


def _arguments(parameters: list[Any]) -> list[Any]:
    return [each for each in parameters if each.param_type_name == "argument"]


def _show_help(command: Any, ctx: Any, parameters: list[Any], commands: dict[str, str]) -> None:
    """Print how a command is called, what it does, its arguments, its options and the commands below it."""
    records = [(each, each.get_help_record(ctx)) for each in parameters]
    arguments = [(each.metavar, record[1]) for each, record in records if each in _arguments(parameters)]
    options = [record for each, record in records if record and each not in _arguments(parameters)]
    console = Terminal()
    console.width = min(console.width, WIDEST)
    usage = f"Usage: {ctx.command_path} {' '.join(command.collect_usage_pieces(ctx))}"
    console.print(f"{usage}\n\n{command.help}", markup=False)  # wrapped in a pager, too
    _show_section(console, "Arguments", arguments)
    _show_section(console, "Options", options)
    _show_section(console, "Commands", commands.items())


def _show_section(console: Terminal, title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Print names and their meanings in two columns."""
    if not rows:
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, meaning in rows:
        table.add_row(f"  [bold]{escape(name)}[/]", escape(_in_words(meaning)))
    console.print(f"\n[bold underline]{title}[/]")
    console.print(table)


def _in_words(meaning: str) -> str:
    """Return an option's meaning without escapes, and with its range in words."""
    for pattern, words in IN_WORDS.items():
        meaning = re.sub(pattern, words, meaning)
    return meaning
