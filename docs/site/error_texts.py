"""Texts of all errors and warnings of a package, read from its sources without importing them.

A text may stand where the error is raised, or come from a constant, a variable, a helper of the same module,
a property of a subclass, or an argument of the function that raises the error: all are followed. In a text,
… stands for what is only known when the error is raised, and ⟨a / b⟩ for one of several texts.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef
DEPTH = 5  # of names and helpers that lead to others
PERCENT, BRACES = re.compile(r"%[-.\d]*[a-z]"), re.compile(r"\{[^{}]*\}")  # what logging and format() fill in
UNKNOWN = "…"
WARNINGS = "Warnings"


class Found(NamedTuple):
    """The text of an error or a warning, and where it is raised."""

    kind: str
    text: str
    module: str
    line: int


class Scope(NamedTuple):
    """Where a text stands: its module, function and class, and arguments of a call, if one is followed."""

    module: str
    body: ast.AST
    owner: ast.ClassDef | None = None
    arguments: dict[str, tuple[ast.expr, Any]] = {}  # noqa: RUF012


class Sources:
    """The syntax trees of a package."""

    def __init__(self, folder: Path) -> None:
        self.trees = {
            ".".join(("offbeat", *path.relative_to(folder).with_suffix("").parts)).removesuffix(
                ".__init__"
            ): (ast.parse(path.read_text(encoding="utf-8")))
            for path in sorted(folder.rglob("*.py"))
        }
        self.classes = {n.name: (n, m) for m, tree in self.trees.items() for n in _all(tree, ast.ClassDef)}

    @cached_property
    def functions(self) -> list[tuple[Function, Scope]]:
        """All functions, each with the scope of its body."""
        found = []
        for module, tree in self.trees.items():
            owners = {id(f): c for c in _all(tree, ast.ClassDef) for f in c.body}
            functions = [*_all(tree, ast.FunctionDef), *_all(tree, ast.AsyncFunctionDef)]
            found += [(f, Scope(module, f, owners.get(id(f)))) for f in functions]
        return found

    @cached_property
    def calls(self) -> dict[str, list[tuple[ast.Call, Scope]]]:
        """All calls by the name that is called, each with its scope."""
        found: dict[str, list[tuple[ast.Call, Scope]]] = {}
        for scope in [Scope(m, tree) for m, tree in self.trees.items()] + [s for _, s in self.functions]:
            for call in _calls(scope.body):
                found.setdefault(_name(call.func), []).append((call, scope))
        return found

    @cached_property
    def named(self) -> dict[str, list[tuple[Function, Scope]]]:
        """All functions by their names."""
        found: dict[str, list[tuple[Function, Scope]]] = {}
        for function, scope in self.functions:
            found.setdefault(function.name, []).append((function, scope))
        return found

    def is_error(self, name: str) -> bool:
        """Return whether a class is an exception."""
        if name in self.classes:
            return any(self.is_error(_name(base)) for base in self.classes[name][0].bases)
        builtin = getattr(builtins, name, None)
        return name == "SSLError" or (isinstance(builtin, type) and issubclass(builtin, Exception))

    # --- the text of an expression

    def texts(self, node: ast.expr, scope: Scope, depth: int = DEPTH) -> list[str]:
        """Return the texts that an expression may be."""
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=parts):
                return ["".join(self.part(part, scope, depth) for part in parts)]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return [self.part(left, scope, depth) + self.part(right, scope, depth)]
            case ast.IfExp(body=one, orelse=other) | ast.BoolOp(values=[one, other]):
                return [*self.texts(one, scope, depth), *self.texts(other, scope, depth)]
            case ast.Call(func=ast.Attribute(value=text, attr="format")):
                return [BRACES.sub(UNKNOWN, each) for each in self.texts(text, scope, depth)]
        if depth and (values := self.values(node, scope)):
            texts = [text for value, where in values for text in self.texts(value, where, depth - 1)]
            constant = isinstance(node, ast.Name) and node.id.isupper()
            words = [text for text in texts if constant or _is_text(text)]
            return words + [""] * ("" in texts) if words else [UNKNOWN]
        return [UNKNOWN]

    def part(self, node: ast.expr, scope: Scope, depth: int) -> str:
        """Return the texts that a part of a text may be, as one."""
        node = node.value if isinstance(node, ast.FormattedValue) else node
        texts = list(dict.fromkeys(self.texts(node, scope, depth)))
        return texts[0] if len(texts) == 1 else f"⟨{' / '.join(text.strip() for text in texts if text)}⟩"

    def values(self, node: ast.expr, scope: Scope) -> list[tuple[ast.expr, Scope]]:
        """Return what a name, an attribute of self or a call of a helper may stand for."""
        match node:
            case ast.Name(id=name) if name in scope.arguments:
                return [scope.arguments[name]]
            case ast.Name(id=name):
                local = [(value, scope) for value in _assigned(scope.body, name)]
                modules = self.trees if name.isupper() else [scope.module]  # others are imported, too
                scopes = [Scope(module, self.trees[module]) for module in modules]
                return local or [(v, s) for s in scopes for v in _assigned(s.body, name, top=True)][:1]
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name) if scope.owner:
                return self._members(scope.owner, name)
            case ast.Subscript(value=table):
                held = self.values(table, scope)
                return [
                    (v, where) for held_, where in held if isinstance(held_, ast.Dict) for v in held_.values
                ]
            case ast.Call(func=function):
                return [
                    (value, inner)
                    for called, where in self._called(function, scope)
                    for inner in [where._replace(arguments=_bound(called, node, scope))]
                    for value in _returned(called)
                ]
        return []

    def _members(self, owner: ast.ClassDef, name: str) -> list[tuple[ast.expr, Scope]]:
        """Return what a class and those that derive from it have under a name."""
        related = [
            (c, m) for c, m in self.classes.values() if c is owner or owner.name in map(_name, c.bases)
        ]
        fields = [(v, Scope(m, c, c)) for c, m in related for v in _assigned(c, name, top=True)]
        owners = {id(c) for c, _ in related}
        known = [(f, s) for f, s in self.named.get(name, ()) if s.owner and id(s.owner) in owners]
        return fields + [(value, scope) for f, scope in known for value in _returned(f)]

    def _called(self, function: ast.expr, scope: Scope) -> list[tuple[Function, Scope]]:
        """Return the functions of the same module that a call may mean."""
        own = isinstance(function, ast.Name) or ast.unparse(function).startswith(("self.", "cls."))
        known = [(f, s) for f, s in self.named.get(_name(function), ()) if s.module == scope.module]
        return known if own else []

    # --- errors

    def raised(self) -> Iterator[Found]:
        """Yield the texts of all errors that are made, and of all warnings that are logged."""
        for call, scope in [each for calls in self.calls.values() for each in calls]:
            for kind, text in self._told(call, scope):
                for where in self._callers(scope, text) or [scope]:
                    for shown in self.texts(text, where):
                        words = PERCENT.sub(UNKNOWN, shown) if kind == WARNINGS else shown
                        if re.search("[a-z]", words):
                            yield Found(kind, words.strip(), scope.module, call.lineno)

    def _told(self, call: ast.Call, scope: Scope) -> Iterator[tuple[str, ast.expr]]:
        """Yield the kind of an error or a warning that a call makes, with its text."""
        name = _name(call.func)
        logs = isinstance(call.func, ast.Attribute) and name in ("warning", "error", "log")
        if logs or self.is_error(name):
            # Before its text, an error may have the path of a field, and a warning its level.
            yield from ((WARNINGS if logs else name, each) for each in call.args[:2])

    def _callers(self, scope: Scope, text: ast.expr) -> list[Scope]:
        """Return the scopes of the calls that hand a function a part of the text that it raises."""
        function = scope.body
        names = {node.id for node in _all(text, ast.Name)}
        own = names & {arg.arg for arg in function.args.args} if isinstance(function, Function) else set()
        found = []
        for call, where in self.calls.get(function.name, ()) if own else ():
            if scope.module == where.module or not function.name.startswith("_"):
                bound = _bound(function, call, where)
                if any(_is_text(t) for name in own & set(bound) for t in self.texts(*bound[name])):
                    found.append(scope._replace(arguments=bound))
        return found


def _all(tree: ast.AST, kind: Any) -> list[Any]:
    return [node for node in ast.walk(tree) if isinstance(node, kind)]


def _calls(body: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls of a function or a module, not those of functions inside it."""
    todo = list(ast.iter_child_nodes(body))
    while todo:
        node = todo.pop(0)
        if not isinstance(node, Function):
            todo += ast.iter_child_nodes(node)
            if isinstance(node, ast.Call):
                yield node


def _name(node: ast.expr) -> str:
    return ast.unparse(node).partition("[")[0].rpartition(".")[2]


def _is_text(text: str) -> bool:
    """Tell words from what a variable may hold by itself, such as a name or a number."""
    return " " in text.strip() and bool(re.search(r"[A-Za-z]{3,}", text))


def _assigned(body: ast.AST, name: str, top: bool = False) -> list[ast.expr]:
    """Return the values that a name is given in a body."""
    found = []
    for node in getattr(body, "body", []) if top else ast.walk(body):
        match node:
            case ast.Assign(targets=[ast.Name(id=given)], value=value) if given == name:
                found.append(value)
            case ast.AnnAssign(target=ast.Name(id=given), value=ast.expr() as value) if given == name:
                found.append(value)
            case ast.AugAssign(target=ast.Name(id=given), value=value) if given == name:
                found.append(value)
            case ast.NamedExpr(target=ast.Name(id=given), value=value) if given == name:
                found.append(value)
    return found


def _returned(function: Function) -> list[ast.expr]:
    """Return the values that a function returns or yields."""
    return [n.value for n in _all(function, (ast.Return, ast.Yield)) if n.value is not None]


def _bound(function: Function, call: ast.Call, scope: Scope) -> dict[str, tuple[ast.expr, Scope]]:
    """Return the arguments of a call by the names of the function's parameters."""
    names = [arg.arg for arg in function.args.args if arg.arg not in ("self", "cls")]
    given = dict(zip(names, call.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    return {name: (value, scope) for name, value in given.items()}
