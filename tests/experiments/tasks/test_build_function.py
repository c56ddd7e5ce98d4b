"""Functions named by texts: where they are looked for, and what is said if they are not there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.errors import SettingError
from offbeat.experiments.tasks.build_function import find_function


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with modules of the user's own; afterwards nothing of them is left."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "neighbour_of_mine.py").write_text("VALUE = 7\n")
    (tmp_path / "mine_here.py").write_text(
        "from neighbour_of_mine import VALUE\n\ndef build():\n    return VALUE\n"
    )
    (tmp_path / "package_here" / "inner").mkdir(parents=True)
    (tmp_path / "package_here" / "inner" / "parts.py").write_text("class Build:\n    pass\n")
    (tmp_path / "broken_here.py").write_text("import no_such_module_at_all\n")
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_modules_of_the_current_folder_are_found(folder: Path) -> None:
    assert find_function("mine_here:build")() == 7
    assert find_function("package_here.inner.parts:Build").__name__ == "Build"


def test_files_are_found_with_their_neighbours(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_function("./mine_here.py:build")() == 7
    monkeypatch.chdir("/")
    assert find_function(f"{folder / 'mine_here.py'}:build")() == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mine_here:", "'mine_here:': write package.module:function or file.py:function"),
        (":build", "':build': write package.module:function or file.py:function"),
        ("not_here:build", "'not_here:build': there is no module 'not_here' in "),
        ("package_here.outer:build", "there is no module 'package_here.outer' in "),
        ("mine_here.deeper:build", "there is no module 'mine_here.deeper' in "),
        ("nowhere/mine.py:build", "'nowhere/mine.py:build': there is no file nowhere/mine.py"),
        ("mine_here:biuld", "mine_here has no 'biuld'; did you mean 'build'? Known: build"),
        ("mine_here:VALUE", "'mine_here:VALUE' is no function: it is of type int"),
    ],
)
def test_what_is_not_there_is_named(folder: Path, text: str, message: str) -> None:
    with pytest.raises(SettingError) as refusal:
        find_function(text)
    assert message in str(refusal.value)


def test_an_import_that_fails_inside_the_module_shows_where(folder: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        find_function("broken_here:build")
