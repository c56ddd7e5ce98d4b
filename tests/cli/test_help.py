"""Help: quick, because torch is not imported for it, and without types of Python."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from typing import get_type_hints

import pytest
from typer.main import get_command
from typer.models import OptionInfo

from offbeat.cli import COMMANDS, app
from offbeat.cli.help import text_of
from tests.support.commands import command
from tests.support.limits import HANG_S

PYTHON_TYPES = re.compile(r"<[a-z]|\b(INTEGER|TEXT|FLOAT|BOOLEAN|None|list\[)")
HEAVY = """
import sys
from offbeat.cli import main
sys.argv = ["offbeat", *sys.argv[1:]]
try:
    main()
except SystemExit as left:
    assert not left.code, left.code
heavy = {"torch", "numpy"} & set(sys.modules)
sys.exit(f"imported: {heavy}" if heavy else 0)
"""


@pytest.mark.processes
@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["--version"]], ids=" ".join)
def test_help_and_version_do_not_import_torch(words: list[str]) -> None:
    subprocess.run([sys.executable, "-c", HEAVY, *words], check=True, timeout=HANG_S)


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_shows_no_types_of_python(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    said = command(*([name] if name else []), "--help")
    assert said.code == 0
    assert PYTHON_TYPES.findall(said.out) == []
    assert said.out == command(*([name] if name else []), "-h").out


def test_the_default_that_help_names_is_the_one_used() -> None:
    from offbeat.worlds.processes.server.bootstrap import SNAPSHOT_S

    assert f"default: {SNAPSHOT_S:g}]" in command("serve", "--help").out


@pytest.mark.parametrize("columns", [60, 80, 200])
@pytest.mark.parametrize("name", COMMANDS)
def test_help_cuts_no_word_in_a_narrow_terminal(
    name: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    said = command(name, "--help").out
    words = said.split()
    for parameter in get_command(app).commands[name].params:  # type: ignore[attr-defined]
        told = parameter.help.replace("\\[", "[").split()
        assert any(words[at : at + len(told)] == told for at in range(len(words))), parameter.name
        if parameter.param_type_name == "option":
            assert {option.rstrip(",") for option in words} >= set(parameter.opts)
    assert max(map(len, said.splitlines())) <= columns


def test_the_help_of_all_commands_cuts_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    words = " ".join(command("--help").out.split())
    for function in COMMANDS.values():
        assert text_of(function).partition("\n\n")[0] in words


def test_an_option_whose_metavar_is_its_name_says_its_name() -> None:
    """Else typer 0.27 takes the metavar for the name: `--WORLD`, and no `--world`."""
    seen = 0
    for registered in app.registered_commands:
        assert registered.callback is not None
        hints = get_type_hints(registered.callback, include_extras=True)
        for name in inspect.signature(registered.callback).parameters:
            for info in getattr(hints.get(name), "__metadata__", ()):
                if isinstance(info, OptionInfo) and (info.metavar or "").lower() == name:
                    seen += 1
                    # an annotation's first name is where a default would be
                    assert info.default == f"--{name}", f"{registered.name}: --{name}"
    assert seen
