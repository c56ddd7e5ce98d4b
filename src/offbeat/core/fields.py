"""Kinds of settings: what one setting means and accepts, declared in the annotation of a dataclass field.

    staleness: Annotated[int, Whole("steps ahead of the slowest worker", of="steps", at_least=0)] = 3

A kind checks values given in Python and reads the texts of a command line. `None` is accepted where the
annotation says `| None`; its text is `none`.
"""

from __future__ import annotations

import math
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from offbeat.errors import SettingError

FieldPath = tuple[str | int, ...]

_NOT_GIVEN = object()
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


class FieldError(SettingError):
    """A setting that cannot be used, by its path in the settings around it.

    With `given`, `problem` names what was expected instead. The message is worded for Python and command
    lines; `in_file` is worded for a file, whose reader puts file and line before it.
    """

    def __init__(
        self, path: FieldPath, problem: str, *, given: Any = _NOT_GIVEN, or_none: bool = False
    ) -> None:
        self.path, self.problem, self.given, self.or_none = path, problem, given, or_none
        name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
        if given is _NOT_GIVEN:
            self.in_file = message = f"{name}: {problem}" if path else problem
        else:
            message = f"{name}={_SHORT.repr(given)}: {problem}{', or None' if or_none else ''}"
            self.in_file = f"{name}: expected {problem}, not {_SHORT.repr(given)}"
        super().__init__(message)

    def inside(self, part: str | int) -> FieldError:
        """Return the same error with its path seen from the settings around it."""
        return FieldError((part, *self.path), self.problem, given=self.given, or_none=self.or_none)

    def __reduce__(self) -> tuple[type[SettingError], tuple[Any, ...]]:
        return SettingError, self.args  # errors travel between processes


@dataclass(frozen=True)
class Key:
    """The name of a field in TOML, where it differs from the name of the attribute."""

    name: str


@dataclass(frozen=True)
class Field(ABC):
    """One kind of setting. `meaning` says what the setting is for."""

    meaning: str = ""

    @property
    def help(self) -> str:
        """Say what the setting is for, as `offbeat list` shows it."""
        return self.meaning

    @property
    @abstractmethod
    def expected(self) -> str:
        """Name the accepted values, such as "a whole number of steps, at least 1"."""

    @abstractmethod
    def read(self, value: Any) -> Any:
        """Return the value as the setting's type, or raise a FieldError. Idempotent."""

    def parse(self, text: str) -> Any:
        """Return the value that a text from a command line stands for, or raise a FieldError."""
        return self.read(text)

    def plain(self, value: Any) -> Any:
        """Return a value in a form that JSON, TOML and command lines can represent."""
        return value

    def refuse(self, value: Any) -> FieldError:
        return FieldError((), self.expected, given=value)


@dataclass(frozen=True)
class Anything(Field):
    """Any value at all: the kind of a setting whose annotation declares nothing."""

    @property
    def expected(self) -> str:
        return "any value"

    def read(self, value: Any) -> Any:
        return value


@dataclass(frozen=True)
class Whole(Field):
    """A whole number within bounds, both included; `of` names what it counts."""

    _: KW_ONLY
    at_least: int | None = None
    at_most: int | None = None
    of: str = ""
    wording: str = ""  # the text of `expected`; empty: built from the bounds

    @property
    def expected(self) -> str:
        noun = f"a whole number of {self.of}" if self.of else "a whole number"
        return self.wording or noun + _bounds(at_least=self.at_least, at_most=self.at_most)

    def read(self, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):  # True is an int to Python
            raise self.refuse(value)
        if (self.at_least is not None and value < self.at_least) or (
            self.at_most is not None and value > self.at_most
        ):
            raise self.refuse(value)
        return value

    def parse(self, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise self.refuse(text) from None
        return self.read(value)


@dataclass(frozen=True)
class Number(Field):
    """A number within bounds; `above` and `below` are not included. Never NaN; infinite only if allowed."""

    _: KW_ONLY
    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None
    infinite: bool = False
    noun: str = "a number"
    wording: str = ""  # the text of `expected`; empty: built from noun and bounds

    @property
    def expected(self) -> str:
        bounds = _bounds(above=self.above, at_least=self.at_least, below=self.below, at_most=self.at_most)
        return self.wording or self.noun + bounds

    def read(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(value)
        if isinstance(value, int) and value.bit_length() > 1000:  # too long for a float
            raise self.refuse("a number that long")
        if not self._accepts(float(value)):
            raise self.refuse(value)
        return float(value)

    def _accepts(self, value: float) -> bool:
        return (
            not math.isnan(value)
            and (self.infinite or not math.isinf(value))
            and (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.below is None or value < self.below)
            and (self.at_most is None or value <= self.at_most)
        )

    def parse(self, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise self.refuse(text) from None
        return self.read(value)


@dataclass(frozen=True)
class Flag(Field):
    """True or False, as texts `true` and `false`."""

    @property
    def expected(self) -> str:
        return "True or False"

    def read(self, value: Any) -> bool:
        if not isinstance(value, bool):
            raise self.refuse(value)
        return value

    def parse(self, text: str) -> bool:
        if text.lower() not in ("true", "false"):
            raise self.refuse(text)
        return text.lower() == "true"


@dataclass(frozen=True)
class Text(Field):
    """Any text; `noun` names it in errors."""

    _: KW_ONLY
    noun: str = "a text"

    @property
    def expected(self) -> str:
        return self.noun

    def read(self, value: Any) -> str:
        if not isinstance(value, str):
            raise self.refuse(value)
        return value


@dataclass(frozen=True)
class Choice(Field):
    """One of a few values: texts, or numbers."""

    _: KW_ONLY
    of: tuple[str, ...] | tuple[int, ...]

    @property
    def help(self) -> str:
        return f"{self.meaning}: {', '.join(map(str, self.of))}"

    @property
    def expected(self) -> str:
        return f"choose one of {', '.join(map(str, self.of))}" if len(self.of) > 1 else repr(self.of[0])

    def read(self, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, type(self.of[0])) or value not in self.of:
            raise self.refuse(value)
        return value

    def parse(self, text: str) -> Any:
        named = {str(value): value for value in self.of}
        if text not in named:
            raise self.refuse(text)
        return named[text]


@dataclass(frozen=True)
class Instance(Field):
    """An object of a class; texts are read where the class has `from_text`, the inverse of `str`."""

    _: KW_ONLY
    of: type[Any]
    noun: str

    @property
    def expected(self) -> str:
        return self.noun

    def read(self, value: Any) -> Any:
        if not isinstance(value, self.of):
            raise self.refuse(value)
        return value

    def parse(self, text: str) -> Any:
        if not hasattr(self.of, "from_text"):
            raise self.refuse(text)
        try:
            value = self.of.from_text(text)
        except SettingError as problem:
            raise FieldError((), f"{text!r}: {problem}") from None
        return self.read(value)

    def plain(self, value: Any) -> Any:
        return str(value) if hasattr(self.of, "from_text") else value


@dataclass(frozen=True)
class ListOf(Field):
    """A list with at least one item, stored as a tuple; with `names`, one item per name."""

    _: KW_ONLY
    item: Field
    noun: str
    names: tuple[str, ...] = ()

    @property
    def expected(self) -> str:
        return self.noun

    def read(self, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or not value or len(value) != (len(self.names) or len(value)):
            raise self.refuse(value)
        parts: Sequence[str | int] = self.names or range(len(value))
        return tuple(read_inside(part, self.item, each) for part, each in zip(parts, value, strict=True))

    def plain(self, value: Any) -> tuple[Any, ...]:
        return tuple(map(self.item.plain, value))


@dataclass(frozen=True)
class FirstOf(Field):
    """A value of one of several kinds: the first that accepts it."""

    _: KW_ONLY
    kinds: tuple[Field, ...]

    @property
    def expected(self) -> str:
        return ", or ".join(kind.expected for kind in self.kinds)

    def read(self, value: Any) -> Any:
        return self._first([kind.read for kind in self.kinds], value)

    def parse(self, text: str) -> Any:
        return self._first([kind.parse for kind in self.kinds], text)

    def _first(self, reads: list[Callable[[Any], Any]], value: Any) -> Any:
        for read in reads:
            try:
                return read(value)
            except FieldError:
                continue
        raise self.refuse(value)


@dataclass(frozen=True)
class NoneOr(Field):
    """A value of another kind, or `None`: the kind of an annotation with `| None`."""

    _: KW_ONLY
    other: Field

    @property
    def help(self) -> str:
        return self.other.help

    @property
    def expected(self) -> str:
        return self.other.expected

    def read(self, value: Any) -> Any:
        return None if value is None else self._try(self.other.read, value)

    def parse(self, text: str) -> Any:
        return None if text.lower() == "none" else self._try(self.other.parse, text)

    def plain(self, value: Any) -> Any:
        return None if value is None else self.other.plain(value)

    @staticmethod
    def _try(read: Callable[[Any], Any], value: Any) -> Any:
        try:
            return read(value)
        except FieldError as error:
            or_none = not error.path
            raise FieldError(error.path, error.problem, given=error.given, or_none=or_none) from None


def read_inside(part: str | int, field: Field, value: Any) -> Any:
    """Read a value; an error's path starts with `part`."""
    try:
        return field.read(value)
    except FieldError as error:
        raise error.inside(part) from None


def _bounds(
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> str:
    """Say in words which numbers are within bounds: " above 0 and at most 1"."""
    if at_least is not None and at_most is not None:
        return f" from {at_least} to {at_most}"
    if at_least is not None and below is not None:
        return f" from {at_least} to below {below}"
    if above is not None:
        return f" above {above}" + ("" if at_most is None else f" and at most {at_most}")
    if at_least is not None:
        return ", 0 or more" if at_least == 0 else f", at least {at_least}"
    return ""
