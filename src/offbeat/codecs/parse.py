"""A codec as text, such as `error_feedback(topk(0.01))`: how command lines, summaries and servers name it."""

from __future__ import annotations

import ast
from dataclasses import MISSING
from typing import Any

from offbeat.codecs.base import Codec
from offbeat.core.settings import nearest, schema
from offbeat.errors import SettingError


def parse_codec(text: str, table: dict[str, type[Codec]]) -> Codec:
    """Build the codec that a text names. Names of classes are taken, too: `ErrorFeedback(TopK(0.01))`."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        raise SettingError("write a codec like error_feedback(topk(0.01))") from None
    codec = _value(tree, table)
    if not isinstance(codec, Codec):
        raise SettingError(f"{text!r} is not a codec{nearest(text, table)}")
    return codec


def _value(node: ast.expr, table: dict[str, type[Codec]]) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float()):
            return node.value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Name(id="true" | "false"):
            return node.id == "true"
        case ast.Name():
            return _made(node.id, [], {}, table)
        case ast.Call(func=ast.Name(id=name)) if all(k.arg for k in node.keywords):
            positional = [_value(argument, table) for argument in node.args]
            named = {str(k.arg): _value(k.value, table) for k in node.keywords}
            return _made(name, positional, named, table)
    raise SettingError(f"{ast.unparse(node)!r} is neither a codec, a number, true nor false")


def _made(name: str, positional: list[Any], named: dict[str, Any], table: dict[str, type[Codec]]) -> Codec:
    plain = {key.replace("_", ""): cls for key, cls in table.items()}
    cls = plain.get(name.replace("_", "").lower())
    if cls is None:
        raise SettingError(f"unknown codec {name!r}{nearest(name, table)}")
    names = [declared.attribute for declared in schema(cls).values()]
    given = dict(zip(names, positional, strict=False))
    if len(positional) > len(names) or not named.keys() <= set(names) - given.keys():
        takes = ", ".join(names) or "nothing"
        raise SettingError(f"codec {cls.name} takes {takes}; given: {[*positional, *named]}")
    for name, declared in schema(cls).items():
        if declared.default is MISSING and name not in given | named:
            raise SettingError(f"codec {cls.name} needs {name}: {declared.field.expected}")
    return cls(**given | named)
