"""Pages of the documentation that are made from the sources: the command line, the Python API, the errors."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

from error_texts import WARNINGS, Sources  # noqa: E402

COMMAND = re.compile(r"^(torchrun|offbeat) .*$", re.MULTILINE)  # a line of help that one can type
TYPED = re.compile(r"^```\n(?=(?:\w+=\S+ )*(?:offbeat|torchrun|python|pip|make|sbatch|sudo) )", re.MULTILINE)
RANGE = re.compile(r"\\\[(default:[^\]]*)\]")


# --- the command line


def mark_commands(markdown: str) -> str:
    """Say of blocks of commands that they are such: long ones wrap on the page, so that none is cut."""
    return TYPED.sub("```sh\n", markdown)


def cli_page(package: Path) -> str:
    """Write the reference of the command line from the commands themselves."""
    sys.path[:0] = [str(package.parent)]  # Offbeat itself need not be installed, nor torch
    from typer.main import get_command

    from offbeat.cli import app

    group: Any = get_command(app)
    parts = ["# Command line", "", "Made from the commands: the same text as `offbeat COMMAND --help`.", ""]
    parts += [
        "`offbeat --version` prints the version, `offbeat --install-completion` teaches your shell.",
        "",
    ]
    for name, command in group.commands.items():
        parts += [f"## offbeat {name}", "", COMMAND.sub(r"`\g<0>`", command.help), ""]
        rows = [_row(parameter) for parameter in command.params]
        parts += ["| option | meaning | default |", "|---|---|---|", *rows, ""]
    return "\n".join(parts)


def _row(parameter: Any) -> str:
    argument = parameter.param_type_name == "argument"
    value = parameter.metavar or ""
    names = value or parameter.name if argument else ", ".join([*parameter.opts, *parameter.secondary_opts])
    shown = f"`{names} {value}`" if value and not argument else f"`{names}`"
    text = parameter.help or ""
    told = RANGE.search(text)
    plain = parameter.default if parameter.default not in (None, False, ()) else ""
    default = told[1].removeprefix("default:").strip() if told else plain
    if callable(default) or "Sentinel" in type(default).__name__ or str(default).startswith("Sentinel"):
        default = ""
    return f"| {shown} | {RANGE.sub('', text).strip()} | {default} |".replace("…|", "…\\|")


# --- the Python API


def api_page(package: Path) -> str:
    """List the public names by the module that defines them; mkdocstrings fills in their docstrings."""
    modules = public_names(package)
    titles = {"attach": "Attach", "strategies": "Strategies", "codecs": "Codecs", "data": "Data"}
    titles |= {"experiments": "Virtual time", "errors": "Errors", "core": "To write your own"}
    rooms: dict[str, list[str]] = {}
    for module, names in modules.items():
        functions_first = sorted(names, key=lambda name: name[0].isupper())
        rooms.setdefault(module.split(".")[1], []).extend(f"{module}.{name}" for name in functions_first)
    parts = [
        "# Python",
        "",
        "`import offbeat` has these names; `help(offbeat.NAME)` shows the same text.",
        "",
    ]
    for room in (*titles, *sorted(set(rooms) - set(titles))):
        parts += [f"## {titles.get(room, room)}", ""]
        for path in rooms.get(room, []):
            parts += [f"::: {path}", "", *settings_table(package, path.rpartition(".")[2]), ""]
    return "\n".join(parts)


def settings_table(package: Path, name: str) -> list[str]:
    """Tabulate the settings of a class and its bases, with the meaning that their annotations give."""
    classes, aliases = _declarations(package)
    rows: dict[str, str] = {}
    pending = [name]
    while pending:
        node = classes.get(pending.pop(0))
        if node is None:
            continue
        pending += [ast.unparse(base).partition("[")[0] for base in node.bases]
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and field.value is not None:
                key = ast.unparse(field.target)
                annotation = aliases.get(ast.unparse(field.annotation), field.annotation)
                meaning = _meaning(annotation, classes, aliases)
                if meaning and key not in rows:
                    rows[key] = f"| `{key}` | `{ast.unparse(field.value)}` | {meaning} |"
    return ["| setting | default | meaning |", "|---|---|---|", *rows.values()] if rows else []


@cache
def _declarations(package: Path) -> tuple[dict[str, ast.ClassDef], dict[str, ast.expr]]:
    """Return the classes of the package, and names that stand for annotations or texts (CodecSetting)."""
    classes: dict[str, ast.ClassDef] = {}
    aliases: dict[str, ast.expr] = {}
    for path in package.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                classes[node.name] = node
            elif isinstance(node, ast.Assign):
                aliases[ast.unparse(node.targets[0])] = node.value
    return classes, aliases


def _meaning(annotation: ast.expr, classes: dict[str, ast.ClassDef], aliases: dict[str, ast.expr]) -> str:
    """Return the first text in an annotation such as Annotated[int, Whole("steps between averages")].

    A kind without a text, such as CodecField(), has it as the default of its field `meaning`.
    """
    if not ast.unparse(annotation).startswith("Annotated["):
        return ""
    texts = []
    for call in (node for node in ast.walk(annotation) if isinstance(node, ast.Call)):
        kind = classes.get(ast.unparse(call.func))
        fields = [field for field in (kind.body if kind else []) if isinstance(field, ast.AnnAssign)]
        own = [field.value for field in fields if ast.unparse(field.target) == "meaning" and field.value]
        texts += [template(aliases.get(ast.unparse(node), node)) for node in (*call.args[:1], *own)]
    return next((text.replace("|", "\\|") for text in texts if text), "")


def public_names(package: Path) -> dict[str, tuple[str, ...]]:
    """Read where `offbeat/__init__.py` says each public name is defined, without importing it."""
    tree = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MODULES":
            known: dict[str, tuple[str, ...]] = ast.literal_eval(node.value)
            return known
    raise ValueError("offbeat/__init__.py has no table _MODULES")


# --- the errors

ERRORS = """Every text of an error or a warning, made from the sources. In a text, … stands for what differs,
and ⟨a / b⟩ for one of several texts. Search this page for the words that you see.
[Troubleshooting](../troubleshooting.md) explains the common ones."""


def errors_page(package: Path) -> str:
    """List the text of every error and of every warning, with the module that it comes from."""
    sources = Sources(package)
    found: dict[str, set[tuple[str, str]]] = {}
    for kind, text, module, _ in sources.raised():
        found.setdefault(kind, set()).add((text, module))
    parts = ["# Errors", "", ERRORS, ""]
    for kind in sorted(found, key=lambda kind: (kind == WARNINGS, hasattr(builtins, kind), kind)):
        parts += [f"## {kind}", "", _about(sources, kind), ""]
        for text, module in sorted(found[kind]):  # a list, for a table has no room for long texts on a phone
            shown = " ".join(text.replace("`", "'").split())
            parts.append(f"- `{shown}` ({module.removeprefix('offbeat.')})")
        parts.append("")
    return "\n".join(parts)


def _about(sources: Sources, kind: str) -> str:
    """Say what a kind of errors is: its docstring, where it is ours."""
    if kind == WARNINGS:
        return "Logged under the name `offbeat` or one below it; training goes on."
    if kind in sources.classes:
        return (ast.get_docstring(sources.classes[kind][0]) or "").partition("\n")[0]
    return "Python's own class. An error of Offbeat may quote such a text."


def template(node: ast.expr) -> str:
    """Return a text with … for what is only known when it is raised; empty if the whole text is."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp):
        return template(node.left) + template(node.right)
    return ""
