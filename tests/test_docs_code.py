"""Code in the documentation: commands have the options that pages give them, strategies their settings."""

from __future__ import annotations

import ast
import re
import shlex
import textwrap
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import offbeat
from offbeat.cli import app, parse
from offbeat.codecs import CODECS
from offbeat.core.units import parse_rate
from offbeat.experiments.tasks import TASKS
from offbeat.strategies import STRATEGIES
from offbeat.worlds.virtual.cluster import load_cluster
from tests.support.commands import command
from tests.test_docs import FENCE, PAGES, ROOT

BLOCK = re.compile(r"^(```|~~~)(\w*)\n(.*?)^\1[ \t]*$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
COMMAND = re.compile(r"(?:^|[\w]\$ |\s-m )offbeat ((?!\d)[\w-].*)$")
CALL = re.compile(r"(offbeat\.)?[A-Z]\w*\(")
PLACEHOLDER = re.compile(r"[A-Z]+|.*…|\$.*")  # TASK, FILE, bsp,…
# Strategies and tasks of pages that lead through writing one.
WRITTEN = ("growing", "rotate", "tightening_ssp", "spirals", "float8")
HISTORY = {ROOT / "docs" / "log.md", ROOT / "docs" / "first_ten_minutes.md"}  # what was typed then
GROUP: Any = get_command(app)
TODAY = [page for page in PAGES if page not in HISTORY and "results" not in page.parts]


def commands(page: Path) -> list[str]:
    """The commands of a page, without `offbeat`, comments and continued lines."""
    text = page.read_text("utf-8")
    lines = [
        line
        for block in BLOCK.findall(text)
        if block[1] in ("", "bash", "sh")
        for line in re.sub(r"\\\n\s*", " ", block[2]).splitlines()
    ]
    found = [COMMAND.search(line) for line in (*lines, *INLINE.findall(FENCE.sub("", text)))]
    return [re.split(r" #|  +", each[1])[0].strip() for each in found if each]


def given(line: str) -> dict[str, Any]:
    """The options and arguments of a command, as they are written, without placeholders."""
    name, *words = shlex.split(line)
    if name.startswith("--"):
        assert name in {option for parameter in GROUP.params for option in parameter.opts} | {"--help"}
        return {}
    called = GROUP.commands[name]
    ctx = called.context_class(called)
    values, _, _ = called.make_parser(ctx).parse_args([word for word in words if word != "--help"])
    for each in called.params:
        if each.metavar == "N" and (value := values.get(each.name)) is not None:
            assert PLACEHOLDER.fullmatch(value) or value.isdigit(), line
    return {name: value for name, value in values.items() if not PLACEHOLDER.fullmatch(str(value))}


@pytest.mark.parametrize("page", TODAY, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_have_their_options_and_values(page: Path) -> None:
    for line in commands(page):
        values = given(line)
        if any(word in line for word in WRITTEN):
            continue
        if isinstance(task := values.get("task"), str) and ":" not in task:
            assert task in TASKS, line
        if "strategies" in values:
            assert parse.strategies_of(values["strategies"], values.get("settings") or []), line
        if "strategy" in values:
            known = [text for text in values.get("settings") or [] if "…" not in text]
            assert parse.strategy_of(values["strategy"], known), line
        if "bandwidth" in values:
            assert parse_rate(values["bandwidth"]) > 1e6, line
        if "cluster" in values and not str(values["cluster"]).endswith(".toml"):
            assert load_cluster(values["cluster"]), line


def calls(page: Path) -> list[str]:
    """The calls of strategies and codecs in a page's Python and in its sentences."""
    text = page.read_text("utf-8")
    blocks = [textwrap.dedent(body) for _, kind, body in BLOCK.findall(text) if kind == "python"]
    spans = [span for span in INLINE.findall(FENCE.sub("", text)) if CALL.match(span)]
    found = []
    for code in [*blocks, *spans]:
        try:
            tree = ast.parse(code)
        except SyntaxError:
            assert "…" in code or code in spans, f"no Python: {code}"
            continue
        found += [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return found


MADE = {cls.__name__: cls for cls in (*STRATEGIES.own.values(), *CODECS.own.values())}


def is_plain(node: ast.AST) -> bool:
    """Whether a call has literals and further calls as arguments, and no names of the page's own."""
    names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
    return all(each.id in MADE or each.id == "offbeat" for each in names)


@pytest.mark.parametrize("page", TODAY, ids=lambda page: str(page.relative_to(ROOT)))
def test_strategies_and_codecs_have_the_settings_that_pages_give_them(page: Path) -> None:
    for code in calls(page):
        node = ast.parse(code, mode="eval").body
        assert isinstance(node, ast.Call)
        if ast.unparse(node.func).removeprefix("offbeat.") in MADE and is_plain(node):
            eval(code, {"offbeat": offbeat, **MADE})


def test_a_wrong_command_is_seen() -> None:
    assert commands(ROOT / "docs" / "tutorial.md")[0].startswith("train digits --workers 4 ")
    for line in ("train digits --perod 8", "traim digits", "--vision", "train digits --workers four"):
        with pytest.raises(Exception, match=r"perod|traim|vision|four"):
            given(line)


@pytest.mark.virtual
def test_commands_for_virtual_time_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the README and the tutorial, shortened; a report of what they wrote."""
    monkeypatch.chdir(tmp_path)
    lines = [line for page in ("README.md", "docs/tutorial.md") for line in commands(ROOT / page)]
    simulated = [line for line in lines if line.startswith("simulate digits")]
    assert len(simulated) >= 2
    for line in simulated:
        said = command(*shlex.split(line), "--workers", 2, "--steps", 2, "--out", "runs/virtual", "--force")
        assert said.code == 0, said.err
    assert command("report", "runs/virtual", "--out", "runs/report.html").code == 0
