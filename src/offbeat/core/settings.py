"""Settings: from the names and texts a user types to an object built with them, or an error that helps."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from offbeat.errors import SettingError

T = TypeVar("T")


def lookup(what: str, name: str, table: Mapping[str, T]) -> T:
    """The entry of that name; if there is none, an error that names the nearest."""
    if name not in table:
        raise SettingError(f"unknown {what} {name!r}{nearest(name, table)}")
    return table[name]


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, and all of them."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    guess = f"; did you mean {close[0]!r}? K" if close else "; k"
    return f"{guess}nown: {', '.join(names)}" if names else "; there are none"


def build(cls: type[T], settings: Mapping[str, Any]) -> T:
    """An instance with these settings, where texts (from a command line) are read as each field's type."""
    types = typing.get_type_hints(cls)
    names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    label = getattr(cls, "name", cls.__name__)
    for name in settings:
        if name not in names:
            raise SettingError(f"{label} has no setting {name!r}{nearest(name, names)}")
    return cls(**{name: read(name, value, types[name]) for name, value in settings.items()})


def read(name: str, value: Any, wanted: Any) -> Any:
    """`value` as the wanted type, if it is a text."""
    if not isinstance(value, str):
        return value
    options = typing.get_args(wanted) or (wanted,)
    if type(None) in options and value.lower() == "none":
        return None
    for option in options:
        if option is bool and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if option in (int, float):
            try:
                return option(value)
            except ValueError:
                continue
        if option is str:
            return value
        if callable(from_text := getattr(option, "from_text", None)):
            return from_text(value)
    allowed = " or ".join(getattr(o, "__name__", str(o)) for o in options)
    raise SettingError(f"{name}={value!r} is not of type {allowed}")


def parse_pairs(pairs: Iterable[str]) -> dict[str, str]:
    """`["period=8"]` as `{"period": "8"}`."""
    parsed = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise SettingError(f"{pair!r}: write it as key=value")
        parsed[key.strip().replace("-", "_")] = value.strip()
    return parsed


def split(text: str) -> list[str]:
    """The parts between commas, but for commas inside of parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            break
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    if depth:
        raise SettingError(f"{text!r}: its parentheses do not match")
    return [part.strip() for part in parts]
