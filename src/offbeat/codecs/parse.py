"""Parser of codecs as text, such as `error_feedback(topk(0.01))`: on command lines, in summaries."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from offbeat.codecs.base import Codec
from offbeat.core.plugins import plain_name
from offbeat.core.settings import check_complete, lookup, nearest, schema
from offbeat.errors import SettingError


def parse_codec(text: str, table: Mapping[str, type[Codec]]) -> Codec:
    """Build the codec that `text` names; the inverse of `str`.

    Names may be those of classes, too: `ErrorFeedback(TopK(0.01))`.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        raise SettingError("write a codec like error_feedback(topk(0.01))") from None
    codec = _value(tree, table)
    if not isinstance(codec, Codec):
        raise SettingError(f"{text!r} is not a codec{nearest(text, table)}")
    return codec


def _value(node: ast.expr, table: Mapping[str, type[Codec]]) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | None):
            return node.value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Name(id="true" | "false"):
            return node.id == "true"
        case ast.Name():
            return _build_codec(node.id, [], {}, table)
        case ast.Call(func=ast.Name(id=name)) if all(k.arg for k in node.keywords):
            positional = [_value(argument, table) for argument in node.args]
            named = {str(k.arg): _value(k.value, table) for k in node.keywords}
            return _build_codec(name, positional, named, table)
    raise SettingError(f"{ast.unparse(node)!r} is neither a codec, a number, true nor false")


def _build_codec(
    name: str, positional: list[Any], named: dict[str, Any], table: Mapping[str, type[Codec]]
) -> Codec:
    known = {plain_name(key): key for key in table}
    cls = lookup("codec", known.get(plain_name(name), name), table)
    names = [declared.attribute for declared in schema(cls).values()]
    given = dict(zip(names, positional, strict=False))
    if len(positional) > len(names) or not named.keys() <= set(names) - given.keys():
        takes = ", ".join(names) or "nothing"
        raise SettingError(f"codec {cls.name} takes {takes}; given: {[*positional, *named]}")
    check_complete(cls, given | named)
    return cls(**given | named)
