"""The documentation site: all pages are in its navigation; pages made from the sources leave nothing out."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.main import get_command

import offbeat
from offbeat.cli import COMMANDS, app
from offbeat.core.settings import schema
from offbeat.strategies import STRATEGIES

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "offbeat"
NAV = re.compile(r"^\s+- [^:]+: (\S+\.md)$|^  - Home: (\S+\.md)$", re.MULTILINE)


@pytest.fixture(scope="module")
def generated() -> ModuleType:
    path = ROOT / "docs" / "site" / "generated.py"
    spec = importlib.util.spec_from_file_location("generated", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_navigation_has_every_page_once() -> None:
    listed = [a or b for a, b in NAV.findall((ROOT / "mkdocs.yml").read_text())]
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    made = {"reference/api.md", "reference/cli.md", "reference/errors.md"}
    assert len(listed) == len(set(listed))
    assert set(listed) == pages | made


def test_commands_wrap_and_drawings_do_not(generated: ModuleType) -> None:
    """Only blocks of commands are marked; docs/style.css lets those wrap."""
    commands = "```\noffbeat list\n```\n\n```\nOFFBEAT_TOKEN=… torchrun train.py\n```\n"
    assert generated.mark_commands(commands).count("```sh\n") == 2
    drawing = "```\nIs K above C?\n├ no\n```\n\n```python\noffbeat .attach()\n```\n"
    assert generated.mark_commands(drawing) == drawing
    style = (ROOT / "docs" / "style.css").read_text()
    assert ".language-sh" in style
    assert "pre-wrap" in style
    assert "pygments_lang_class: true" in (ROOT / "mkdocs.yml").read_text(), "else the class is not written"


def test_the_command_line_is_complete(generated: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    text = generated.cli_page(PACKAGE)
    for name in COMMANDS:
        assert f"## offbeat {name}\n" in text
        for parameter in get_command(app).commands[name].params:  # type: ignore[attr-defined]
            for option in parameter.opts if parameter.param_type_name == "option" else ():
                assert option in text
    assert "Sentinel" not in text
    assert "<bound" not in text


def test_the_api_has_every_public_name_and_every_setting(generated: ModuleType) -> None:
    text = generated.api_page(PACKAGE)
    for name in offbeat.__all__:
        assert re.search(rf"^::: offbeat\.[\w.]+\.{name}$", text, re.MULTILINE), name
    for cls in STRATEGIES.own.values():
        table = "\n".join(generated.settings_table(PACKAGE, cls.__name__))
        for declared in schema(cls).values():
            assert f"| `{declared.attribute}` |" in table, cls
        assert table in text
