"""Frozen records in TOML: each field's type says what it accepts, and every mistake is told with its line."""

import dataclasses
import json
import re
import reprlib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Self, TypeVar, get_type_hints

from offbeat.core.settings import nearest
from offbeat.errors import SettingError

FieldPath = tuple[str | int, ...]
R = TypeVar("R", bound="Settings")


class FieldError(SettingError):
    """A field that cannot be used, by its path in the record; a reader of files adds the line."""

    def __init__(self, path: FieldPath, problem: str) -> None:
        dotted = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
        super().__init__(f"{dotted}: {problem}" if path else problem)
        self.path, self.problem = path, problem


@dataclass(frozen=True)
class Key:
    """In `Annotated`: the field's name in TOML, where it is not the name of the attribute."""

    name: str


@dataclass(frozen=True)
class Field:
    """In `Annotated`: what a field accepts. `read` also takes what it once gave; it raises FieldError."""

    expected: str
    read: Callable[[Any], Any]
    write: Callable[[Any], str]


class Settings:
    """Base of keyword-only frozen dataclasses that check themselves, made in Python or from a file."""

    def __post_init__(self) -> None:
        for key, (field, kind) in schema(type(self)).items():
            value = getattr(self, field.name)
            if value is not field.default:
                object.__setattr__(self, field.name, _within(key, kind.read, value))
        self.check()

    def check(self) -> None:
        """What one field alone cannot tell; raises FieldError."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Self:
        known = schema(cls)
        for key in table:
            if key not in known:
                raise FieldError((key,), f"not a known field{nearest(key, known)}")
        for key, (field, kind) in known.items():
            if field.default is MISSING and key not in table:
                raise FieldError((key,), f"missing; expected {kind.expected}")
        return cls(**{known[key][0].name: value for key, value in table.items()})


_SCHEMAS: dict[type[Settings], dict[str, tuple[dataclasses.Field[Any], Field]]] = {}


def schema(record: type[Settings]) -> dict[str, tuple[dataclasses.Field[Any], Field]]:
    """The fields of a record by their names in TOML."""
    if record in _SCHEMAS:
        return _SCHEMAS[record]
    hints = get_type_hints(record, include_extras=True)
    known = {}
    for field in fields(record):  # type: ignore[arg-type]  # every subclass is a dataclass
        marks = getattr(hints[field.name], "__metadata__", ())
        key = next((mark.name for mark in marks if isinstance(mark, Key)), field.name)
        known[key] = (field, next(mark for mark in marks if isinstance(mark, Field)))
    _SCHEMAS[record] = known
    return known


def _within(part: str | int, read: Callable[[Any], Any], value: Any) -> Any:
    try:
        return read(value)
    except FieldError as error:
        raise FieldError((part, *error.path), error.problem) from None


# --- kinds of fields


def unfit(expected: str, value: object) -> FieldError:
    return FieldError((), f"expected {expected}, not {reprlib.repr(value)}")


def number(expected: str, fits: Callable[[float], bool]) -> Field:
    def read(value: Any) -> float:
        # TOML's true would pass for an int, and a TOML integer may be too long for a float
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise unfit(expected, value)
        if isinstance(value, int) and value.bit_length() > 1000:
            raise unfit(expected, "a number that long")
        if not fits(float(value)):
            raise unfit(expected, value)
        return float(value)

    return Field(expected, read, to_value)


def whole(expected: str, low: int, high: int) -> Field:
    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise unfit(expected, value)
        return value

    return Field(expected, read, to_value)


def text(expected: str) -> Field:
    def read(value: Any) -> str:
        if not isinstance(value, str):
            raise unfit(expected, value)
        return value

    return Field(expected, read, to_value)


def some(expected: str, item: Field) -> Field:
    """A list with at least one item."""

    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or not value:
            raise unfit(expected, value)
        return tuple(_within(index, item.read, each) for index, each in enumerate(value))

    return Field(expected, read, to_value)


def table(expected: str, record: type[Settings]) -> Field:
    def read(value: Any) -> Settings:
        if isinstance(value, record):
            return value
        if not isinstance(value, Mapping):
            raise unfit(expected, value)
        return record.from_table(value)

    return Field(expected, read, to_value)


# --- reading


def read_toml(record: type[R], source: str, file: str) -> R:
    """The record that a TOML text describes; `file` names the text in errors."""
    try:
        return record.from_table(tomllib.loads(source))
    except tomllib.TOMLDecodeError as error:
        found = re.fullmatch(r"(.*) \(at (?:line (\d+), column \d+|end of document)\)", str(error), re.DOTALL)
        problem, line = (found[1], found[2]) if found else (str(error), None)
        raise SettingError(f"{file}, line {line or len(source.splitlines())}: not TOML: {problem}") from None
    except FieldError as error:
        raise SettingError(f"{file}, line {line_of(error.path, source)}: {error}") from None


def line_of(path: FieldPath, source: str) -> int:
    """The line of a field, or of the innermost table around it that has a line of its own."""
    lines = _lines(source)
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 1)


_STRING_OR_COMMENT = re.compile(
    r'"""(?:\\.|.)*?"""|\'\'\'.*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|#[^\n]*', re.DOTALL
)
_HEADER = re.compile(r"\s*(\[\[?)([^\[\]]+)\]")
_ASSIGNMENT = re.compile(r"\s*([\w.\s-]+?)\s*=")


def _lines(source: str) -> dict[FieldPath, int]:
    """Where headers and keys stand: `tomllib` does not say, so the text it accepted is scanned again."""
    bare = _STRING_OR_COMMENT.sub(lambda found: "\n" * found[0].count("\n"), source)
    lines: dict[FieldPath, int] = {}
    repeats: dict[FieldPath, int] = {}
    here: FieldPath = ()
    depth = 0
    for number_of_line, line in enumerate(bare.split("\n"), start=1):
        if depth == 0 and (header := _HEADER.match(line)):
            here = ()
            *outer, last = (part.strip() for part in header[2].split("."))
            for part in outer:
                here = (*here, part)
                here = (*here, repeats[here] - 1) if here in repeats else here
            here = (*here, last)
            if header[1] == "[[":
                repeats[here] = repeats.get(here, 0) + 1
                here = (*here, repeats[here] - 1)
            lines[here] = number_of_line
        elif depth == 0 and (assignment := _ASSIGNMENT.match(line)):
            lines[(*here, *(part.strip() for part in assignment[1].split(".")))] = number_of_line
        depth += sum(map(line.count, "[{")) - sum(map(line.count, "]}"))
    return lines


# --- writing


def write_toml(record: Settings) -> str:
    """TOML that reads back equal: simple fields, then tables; what is at its default is left out."""
    simple, tables = [], []
    for key, value, kind in _written(record):
        if isinstance(value, Settings):
            tables.append(f"\n[{key}]\n{_assignments(value)}")
        elif isinstance(value, tuple) and isinstance(value[0], Settings):
            tables += [f"\n[[{key}]]\n{_assignments(each)}" for each in value]
        else:
            simple.append(f"{key} = {kind.write(value)}\n")
    return "".join(simple + tables)


def to_value(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return f"[{', '.join(map(to_value, value))}]"
    if isinstance(value, Settings):
        return f"{{ {', '.join(f'{key} = {kind.write(part)}' for key, part, kind in _written(value))} }}"
    return repr(value)


def _assignments(record: Settings) -> str:
    return "".join(f"{key} = {kind.write(value)}\n" for key, value, kind in _written(record))


def _written(record: Settings) -> list[tuple[str, Any, Field]]:
    values = [
        (key, getattr(record, field.name), field, kind) for key, (field, kind) in schema(type(record)).items()
    ]
    return [(key, value, kind) for key, value, field, kind in values if value != field.default]
