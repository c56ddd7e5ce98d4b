"""Reader of a package's source: modules, imports, strings, classes and docstrings, without importing any."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class SourceFile:
    """One module of a package."""

    name: str  # in full, such as offbeat.core.port
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def parts(self) -> list[str]:
        """Names below the package: of offbeat.core.port, `["core", "port"]`; of the package, none."""
        return self.name.split(".")[1:]

    @property
    def room(self) -> str:
        """Name in the package's root that this module belongs to; `__init__` for the package itself."""
        return self.parts[0] if self.parts else "__init__"

    @cached_property
    def names(self) -> frozenset[str]:
        """Full names of all modules and members that this file imports, and of all that it uses of them."""
        return frozenset(_names(ast.walk(self.tree)))

    @cached_property
    def runtime_names(self) -> frozenset[str]:
        """The same without imports that only a type checker runs."""
        return frozenset(_names(_walk_runtime(self.tree)))

    def uses(self, modules: set[str]) -> set[str]:
        """Return which of these modules the file imports, or uses a member of."""
        return {m for m in modules for name in self.names if name == m or name.startswith(f"{m}.")}

    @cached_property
    def strings(self) -> list[str]:
        """All texts in the file, docstrings included; `{}` stands for a value inserted into an f-string."""
        texts = []
        inserted: set[ast.AST] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
                texts.append("".join(map(str, parts)))
                inserted |= {part for part in node.values if isinstance(part, ast.Constant)}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inserted:
                texts.append(node.value)
        return texts

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)]

    @property
    def docstrings(self) -> Iterator[tuple[str, str]]:
        """Name and text of each docstring."""
        for node in ast.walk(self.tree):
            if isinstance(node, Documented) and (text := ast.get_docstring(node)):
                yield (self.name if isinstance(node, ast.Module) else f"{self.name}.{node.name}"), text


class Package:
    """All modules of a package, and which imports which."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = {}
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root.parent).with_suffix("").parts
            name = ".".join(part for part in parts if part != "__init__")
            self.files[name] = SourceFile(name, path)

    def imports(self, name: str, runtime: bool = False) -> set[str]:
        """Return the modules of this package that a module imports; with `runtime`, not for types alone."""
        file = self.files[name]
        names = file.runtime_names if runtime else file.names
        return {self._module_of(used) for used in names} - {"", name}

    def reached(self, name: str) -> set[str]:
        """Return the modules of this package that a module imports, directly or through others."""
        found: set[str] = set()
        left = [name]
        while left:
            new = self.imports(left.pop()) - found
            found |= new
            left += new
        return found

    def _module_of(self, name: str) -> str:
        """Return the longest prefix of a name that is a module of this package; empty if none is."""
        while name and name not in self.files:
            name = name.rpartition(".")[0]
        return name

    def members(self, class_name: str, beside: frozenset[str] = frozenset()) -> set[str]:
        """Return the public members of a class and of its bases in this package, but the bases `beside`.

        Fields, class variables, properties, methods, and attributes that a method sets on `self`.
        """
        found: set[str] = set()
        for node in (each for file in self.files.values() for each in file.classes):
            if node.name != class_name:
                continue
            for base in node.bases:
                base_name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
                if base_name not in beside and base_name != class_name:
                    found |= self.members(base_name, beside)
            found |= set(_own_members(node))
        return {name for name in found if not name.startswith("_")}


def _own_members(node: ast.ClassDef) -> Iterator[str]:
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement.name
            for inner in ast.walk(statement):
                is_set = isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
                if is_set and ast.unparse(inner.value) == "self":
                    yield inner.attr
        elif isinstance(statement, ast.AnnAssign):
            yield ast.unparse(statement.target)
        elif isinstance(statement, ast.Assign):
            yield from map(ast.unparse, statement.targets)


def _names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    aliases: dict[str, str] = {}
    attributes = []
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
                first = alias.name.partition(".")[0]
                aliases[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"import {node.module} by its full name"
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute):
            attributes.append(ast.unparse(node).partition("."))
    for first, _, rest in attributes:
        if first in aliases:
            yield f"{aliases[first]}.{rest}"


def _walk_runtime(node: ast.AST) -> Iterator[ast.AST]:
    """Walk a tree, but not into `if TYPE_CHECKING:`."""
    yield node
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        children: Iterable[ast.AST] = node.orelse
    else:
        children = ast.iter_child_nodes(node)
    for child in children:
        yield from _walk_runtime(child)
