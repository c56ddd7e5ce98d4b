"""Settings: frozen dataclasses that check themselves, built from values or from texts that a user types.

Each field declares what it accepts (`core/fields.py`); every mistake is an error that names the setting, what
was expected, and what was given.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, MISSING, dataclass
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from offbeat.core.fields import (
    Anything,
    Field,
    FieldError,
    FirstOf,
    Flag,
    Key,
    NoneOr,
    Number,
    Text,
    Whole,
    read_inside,
)
from offbeat.errors import SettingError

T = TypeVar("T")
S = TypeVar("S", bound="Settings")


class Declared(NamedTuple):
    """A setting as its class declares it: the attribute, its default (MISSING: none), and its kind."""

    attribute: str
    default: Any
    field: Field
    positional: bool


class Settings:
    """Base of frozen dataclasses that check their fields when they are made.

    A field's kind stands in its annotation: `period: Annotated[int, Whole("…", at_least=1)] = 8`. Fields of
    plain types (int, float, bool, str, or one of them with `| None`) are checked for their type.
    """

    refused: ClassVar[Mapping[str, str]] = {}
    """Settings that users might expect and that this class refuses, each with the reason."""

    def __new__(cls, *args: object, **settings: object) -> Self:
        names = _names(cls)
        if len(args) > sum(declared.positional for declared in schema(cls).values()):
            raise _positional_settings(cls, args)
        for name in settings:
            if name not in names:
                raise unknown_setting(cls, name)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for key, declared in schema(type(self)).items():
            value = getattr(self, declared.attribute)
            if value is not declared.default:
                object.__setattr__(self, declared.attribute, read_inside(key, declared.field, value))
        self.check()

    def check(self) -> None:
        """Check conditions between several fields; raise a SettingError if one does not hold."""

    def settings(self) -> dict[str, Any]:
        """Return plain data from which an equal object can be built."""
        return {d.attribute: d.field.plain(getattr(self, d.attribute)) for d in schema(type(self)).values()}

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Self:
        """Build an object from a TOML table; errors are FieldErrors, whose path leads to the line."""
        known = schema(cls)
        for key in table:
            if key not in known:
                raise FieldError((key,), f"not a known field{nearest(key, known)}")
        for key, declared in known.items():
            if declared.default is MISSING and key not in table:
                raise FieldError((key,), f"missing; expected {declared.field.expected}")
        return cls(**{known[key].attribute: value for key, value in table.items()})


def _positional_settings(cls: type[Settings], args: tuple[object, ...]) -> SettingError:
    """Return the error about values without a name; it shows the call with the names that fit."""
    given = ", ".join(map(repr, args))
    named: dict[str, object] = {}
    for value in args:
        fitting = (d for d in schema(cls).values() if d.attribute not in named and _accepts(d.field, value))
        declared = next(fitting, None)
        if declared is not None:
            named[declared.attribute] = value
    call = ", ".join(f"{name}={value!r}" for name, value in named.items()) or "NAME=VALUE"
    return SettingError(
        f"{cls.__name__}({given}): say what each value is, as in {cls.__name__}({call}). The settings "
        f"are {', '.join(sorted(_names(cls)))}"
    )


def _accepts(field: Field, value: object) -> bool:
    try:
        read_inside("", field, value)
    except SettingError:
        return False
    return True


_SCHEMAS: dict[type[Settings], dict[str, Declared]] = {}
_NAMES: dict[type[Settings], frozenset[str]] = {}


def schema(cls: type[Settings]) -> dict[str, Declared]:
    """Return the declared settings of a class, by their names in TOML."""
    if cls in _SCHEMAS:
        return _SCHEMAS[cls]
    declared = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]  # every subclass is a dataclass
        hint = _hint(cls, field.name)
        marks = getattr(hint, "__metadata__", ())
        key = next((mark.name for mark in marks if isinstance(mark, Key)), field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory
        declared[key] = Declared(field.name, default, _kind(hint), not field.kw_only)
    _SCHEMAS[cls] = declared
    return declared


def _names(cls: type[Settings]) -> frozenset[str]:
    """Return the names of a class's settings in Python."""
    if cls not in _NAMES:
        _NAMES[cls] = frozenset(declared.attribute for declared in schema(cls).values())
    return _NAMES[cls]


def _hint(cls: type, name: str) -> Any:
    """Evaluate one field's annotation; return Any if a name in it exists for type checkers only."""
    owner = next(base for base in cls.__mro__ if name in inspect.get_annotations(base))
    alone = types.SimpleNamespace(__annotations__={name: inspect.get_annotations(owner)[name]})
    namespace = vars(sys.modules[owner.__module__])
    try:
        return typing.get_type_hints(alone, namespace, include_extras=True)[name]
    except NameError:
        return Any


_PLAIN: dict[Any, Field] = {int: Whole(), float: Number(infinite=True), bool: Flag(), str: Text()}


def _kind(hint: Any) -> Field:
    """Return the kind that an annotation declares, or else the one of its plain type."""
    bare = hint.__origin__ if hasattr(hint, "__metadata__") else hint
    options = typing.get_args(bare) if isinstance(bare, types.UnionType) else (bare,)
    not_none = [option for option in options if option is not types.NoneType]
    marks = [mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Field)]
    if marks:
        kind = marks[0]
    elif all(isinstance(option, type) and option in _PLAIN for option in not_none):
        kinds = tuple(_PLAIN[option] for option in not_none)
        kind = kinds[0] if len(kinds) == 1 else FirstOf(kinds=kinds)
    else:
        kind = Anything()
    return NoneOr(kind.meaning, other=kind) if types.NoneType in options else kind


@dataclass(frozen=True)
class Table(Field):
    """Settings inside other settings: in TOML a table."""

    _: KW_ONLY
    of: type[Settings]
    noun: str = "a table"

    @property
    def expected(self) -> str:
        return self.noun

    def read(self, value: Any) -> Settings:
        if isinstance(value, self.of):
            return value
        if not isinstance(value, Mapping):
            raise self.refuse(value)
        return self.of.from_table(value)


# --- from texts


def build(cls: type[S], settings: Mapping[str, Any]) -> S:
    """Build an object from settings of which some may be texts from a command line."""
    known = {declared.attribute: declared.field for declared in schema(cls).values()}
    values = {}
    for name, value in settings.items():
        if name not in known:
            raise unknown_setting(cls, name)
        values[name] = parse_value(name, value, known[name])
    check_complete(cls, values)
    return cls(**values)


def check_complete(cls: type[Settings], given: Mapping[str, Any]) -> None:
    """Raise an error if a setting without a default is not given."""
    for declared in schema(cls).values():
        if declared.default is MISSING and declared.attribute not in given:
            raise SettingError(f"{label_of(cls)} needs {declared.attribute}: {declared.field.expected}")


def parse_value(name: str, value: Any, field: Field) -> Any:
    """Return the value that a text stands for; values that are not texts are returned unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return field.parse(value)
    except FieldError as error:
        raise error.inside(name) from None


def parse_pairs(pairs: Iterable[str]) -> dict[str, str]:
    """Return `["period=8"]` as `{"period": "8"}`."""
    parsed = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise SettingError(f"{pair!r} is not a setting: write it as key=value")
        parsed[key.strip().replace("-", "_")] = value.strip()
    return parsed


def split(text: str) -> list[str]:
    """Split a text at its commas, except for commas inside parentheses."""
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


# --- to texts


def non_defaults(cls: type[Settings], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those plain settings that differ from the defaults of `cls`."""
    known = {declared.attribute: declared for declared in schema(cls).values()}

    def differs(name: str, value: Any) -> bool:
        return name not in known or value != known[name].field.plain(known[name].default)

    return {name: v for name, v in without_refused(cls, settings).items() if differs(name, v)}


def without_refused(cls: type[Settings], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those that are None and refused: older versions listed such ones."""
    refused = cls.refused.keys() - _names(cls)
    return {name: value for name, value in settings.items() if value is not None or name not in refused}


def call_text(settings: Settings) -> str:
    """Write settings as a call, such as `quantize(4, stochastic=true)`.

    The first setting, if it is positional, is always written; others where they differ from the defaults.
    """
    written = []
    for number, (name, declared) in enumerate(schema(type(settings)).items()):
        value = getattr(settings, declared.attribute)
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if number == 0 and declared.positional:
            written.append(text)
        elif value != declared.default:
            written.append(f"{name}={text}")
    label = label_of(type(settings))
    return f"{label}({', '.join(written)})" if written else label


# --- names


def label_of(cls: type) -> str:
    """Return the name by which users know a class of settings."""
    name = getattr(cls, "name", None)
    return name if isinstance(name, str) else cls.__name__


def unknown_setting(cls: type[Settings], name: str) -> SettingError:
    """Return the error about a setting that a class does not have."""
    if name in cls.refused:
        return SettingError(f"{label_of(cls)} takes no {name}: {cls.refused[name]}")
    names = [declared.attribute for declared in schema(cls).values()]
    return SettingError(f"{label_of(cls)} has no setting {name!r}{nearest(name, names)}")


def lookup(what: str, name: str, table: Mapping[str, T]) -> T:
    """Return the entry of that name; if there is none, raise an error that names the nearest."""
    if name not in table:
        raise SettingError(f"unknown {what} {name!r}{nearest(name, table)}")
    return table[name]


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest known one, and all of them."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    guess = f"; did you mean {close[0]!r}? K" if close else "; k"
    return f"{guess}nown: {', '.join(names)}" if names else "; there are none"
