"""The settings of a class in its docstring and its signature, where `help()` finds them."""

from __future__ import annotations

import inspect
from dataclasses import MISSING
from inspect import Parameter

from offbeat.core.settings import Declared, Settings, schema


def document(cls: type[Settings]) -> None:
    """Append the settings to the docstring of a class, and show its signature without annotations."""
    declared = list(schema(cls).values())
    if not declared or "__signature__" in vars(cls):
        return
    lines = [f"    {_call(each)}: {each.field.help}" for each in declared]
    cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__ or ""), "", "Settings:", "", *lines])
    parameters = [_parameter(each) for each in declared]
    ordered = sorted(parameters, key=lambda parameter: parameter.kind)
    cls.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
    if made := vars(cls).get("__init__"):
        this = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
        made.__signature__ = inspect.Signature([this, *ordered])


def _call(declared: Declared) -> str:
    missing = declared.default is MISSING
    return declared.attribute if missing else f"{declared.attribute}={declared.default!r}"


def _parameter(declared: Declared) -> Parameter:
    kind = Parameter.POSITIONAL_OR_KEYWORD if declared.positional else Parameter.KEYWORD_ONLY
    default = Parameter.empty if declared.default is MISSING else declared.default
    return Parameter(declared.attribute, kind, default=default)
