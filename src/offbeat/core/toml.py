"""Reader and writer of TOML files of settings; every mistake is shown with its line."""

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any, TypeVar

from offbeat.core.fields import FieldError, FieldPath
from offbeat.core.settings import Settings, schema
from offbeat.errors import SettingError

S = TypeVar("S", bound=Settings)


# --- reading


def read_toml(cls: type[S], source: str, file: str) -> S:
    """Build the settings that a TOML text describes; `file` names the text in errors."""
    try:
        return cls.from_table(tomllib.loads(source))
    except tomllib.TOMLDecodeError as error:
        found = re.fullmatch(r"(.*) \(at (?:line (\d+), column \d+|end of document)\)", str(error), re.DOTALL)
        problem, line = (found[1], found[2]) if found else (str(error), None)
        raise SettingError(f"{file}, line {line or len(source.splitlines())}: not TOML: {problem}") from None
    except FieldError as error:
        raise SettingError(f"{file}, line {line_of(error.path, source)}: {error.in_file}") from None


def line_of(path: FieldPath, source: str) -> int:
    """Return the line of a field, or else of the innermost enclosing table that has a line."""
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
    """Find the lines of headers and keys: `tomllib` does not report them, so scan the text again."""
    bare = _STRING_OR_COMMENT.sub(lambda found: "\n" * found[0].count("\n"), source)
    lines: dict[FieldPath, int] = {}
    repeats: dict[FieldPath, int] = {}
    table: FieldPath = ()
    depth = 0
    for line_number, line in enumerate(bare.split("\n"), start=1):
        if depth == 0 and (header := _HEADER.match(line)):
            table = ()
            *outer, last = (part.strip() for part in header[2].split("."))
            for part in outer:
                table = (*table, part)
                table = (*table, repeats[table] - 1) if table in repeats else table
            table = (*table, last)
            if header[1] == "[[":
                repeats[table] = repeats.get(table, 0) + 1
                table = (*table, repeats[table] - 1)
            lines[table] = line_number
        elif depth == 0 and (assignment := _ASSIGNMENT.match(line)):
            lines[(*table, *(part.strip() for part in assignment[1].split(".")))] = line_number
        depth += sum(map(line.count, "[{")) - sum(map(line.count, "]}"))
    return lines


# --- writing


def write_toml(settings: Settings) -> str:
    """Write TOML that reads back equal: simple fields, then tables. Fields at their defaults are left out."""
    simple, tables = [], []
    for key, value in _written(settings):
        if isinstance(value, Settings):
            tables.append(f"\n[{key}]\n{_assignments(value)}")
        elif isinstance(value, tuple) and isinstance(value[0], Settings):
            tables += [f"\n[[{key}]]\n{_assignments(each)}" for each in value]
        else:
            simple.append(f"{key} = {to_value(value)}\n")
    return "".join(simple + tables)


def to_value(value: Any) -> str:
    """Write one value; settings and mappings become inline tables, None the text "none"."""
    if value is None:
        return '"none"'
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(to_value, value))}]"
    if isinstance(value, Settings):
        return to_value(dict(_written(value)))
    if isinstance(value, Mapping):
        written = [f"{key} = {to_value(each)}" for key, each in value.items()]
        return f"{{ {', '.join(written)} }}" if written else "{}"
    return repr(value)


def _assignments(settings: Settings) -> str:
    return "".join(f"{key} = {to_value(value)}\n" for key, value in _written(settings))


def _written(settings: Settings) -> list[tuple[str, Any]]:
    """Return keys and plain values of the fields that are not at their defaults."""
    declared = [(key, getattr(settings, d.attribute), d) for key, d in schema(type(settings)).items()]
    return [(key, d.field.plain(value)) for key, value, d in declared if value != d.default]
