"""Help for people: the metavars of the options alone, no types of Python; `-h` is `--help`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from typer.core import TyperCommand, TyperGroup

SETTINGS = {"help_option_names": ["-h", "--help"]}


def text_of(command: Callable[..., None]) -> str:
    """Return a command's docstring with one line per paragraph, for the terminal to wrap."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)


class PlainCommand(TyperCommand):
    """A command whose help shows no types."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class PlainGroup(TyperGroup):
    """A group of commands whose help shows no types."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


def _without_types(parameters: list[Any]) -> list[Any]:
    """Remove the types that typer shows beside arguments, and beside options that take no value."""
    for parameter in parameters:
        if parameter.param_type_name == "argument":
            parameter.display_type_rich = _nothing  # which typer asks since 0.29
        elif parameter.is_flag:
            parameter.metavar = ""
    return parameters


def _nothing(ctx: Any) -> None:
    """Return no type."""
