"""Plugins: when they are imported, which names they may have, and what is said of those that are refused."""

from __future__ import annotations

import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

import pytest

from offbeat.core.plugins import Catalog, plain_name
from offbeat.core.settings import lookup
from offbeat.errors import SettingError
from tests.support.limits import HANG_S
from tests.support.plugins import offer

GROUP = "offbeat_test.shapes"


class Shape(ABC):
    """A class that has plugins."""

    name: ClassVar[str]
    summary: ClassVar[str]

    @abstractmethod
    def area(self) -> float: ...


class Square(Shape):
    name, summary = "square", "a shape of ours"

    def area(self) -> float:
        return 1.0


ROUND = """
from tests.core.test_plugins import Shape, Square

class Circle(Square):
    name, summary = "circle", "a shape of others"

class Renamed(Square):
    name = "oval"

class Silent(Square):
    name, summary = "silent", None

class Unfinished(Shape):
    name, summary = "unfinished", "no area"

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose packages look installed, and are forgotten after the test."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("round_shapes", "more_shapes", "broken_shapes"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def catalog() -> Catalog[Shape]:
    return Catalog("shape", GROUP, Shape, {"square": Square})


def test_without_plugins_there_are_our_own() -> None:
    shapes = catalog()
    assert (list(shapes), len(shapes), shapes["square"]) == (["square"], 1, Square)
    assert shapes.load() == ({"square": Square}, {})
    assert shapes.package_of("square") is None
    with pytest.raises(KeyError):
        shapes["circle"]


def test_plugin_is_imported_when_it_is_looked_up(folder: Path) -> None:
    offer(folder, "round-shapes", GROUP, {"circle": "round_shapes:Circle"}, ROUND)
    shapes = catalog()
    assert list(shapes) == ["square", "circle"] and "circle" in shapes and len(shapes) == 2
    with pytest.raises(SettingError, match="unknown shape 'cirle'; did you mean 'circle'"):
        lookup("shape", "cirle", shapes)
    assert shapes["square"] is Square
    assert "round_shapes" not in sys.modules, "names alone import nothing"
    circle = lookup("shape", "circle", shapes)
    assert issubclass(circle, Square) and circle.name == "circle"
    assert shapes.load() == ({"square": Square, "circle": circle}, {})
    assert shapes.package_of("circle") == "round-shapes 1.0"


@pytest.mark.parametrize("name", ["square", "Squ_are"])
def test_name_of_ours_is_refused(folder: Path, name: str) -> None:
    offer(folder, "round-shapes", GROUP, {name: "round_shapes:Circle"}, ROUND)
    said = (
        rf"the shape '{name}' is offered more than once: by Offbeat itself \(square\), and by "
        rf"round-shapes 1.0 \(entry point {GROUP}: {name} = round_shapes:Circle\). Uninstall one"
    )
    for asked in (name, "square"):
        with pytest.raises(SettingError, match=said.replace(f"shape '{name}'", f"shape '{asked}'")):
            catalog()[asked]
    classes, reasons = catalog().load()
    assert classes == {"square": Square}
    assert list(reasons) == list(dict.fromkeys(["square", name]))


def test_name_of_two_packages_is_refused(folder: Path) -> None:
    offer(folder, "round-shapes", GROUP, {"circle": "round_shapes:Circle"}, ROUND)
    offer(folder, "more-shapes", GROUP, {"circle": "more_shapes:Circle"}, ROUND)
    with pytest.raises(
        SettingError, match=r"offered more than once: by .*-shapes 1.0 .* by .*-shapes 1.0"
    ) as told:
        catalog()["circle"]
    assert "round-shapes 1.0" in str(told.value) and "more-shapes 1.0" in str(told.value)
    assert not {"round_shapes", "more_shapes"} & sys.modules.keys()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("circle", "nowhere:Circle", "cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
        ("circle", "round_shapes:Missing", "cannot be imported: AttributeError: .*'Missing'"),
        ("circle", "broken_shapes:Circle", "cannot be imported: ZeroDivisionError: division by zero"),
        ("circle", "round_shapes:number", r"cannot be used: it is 3, and no subclass of tests\..*\.Shape"),
        ("circle", "json:JSONDecoder", r"it is <class 'json.*JSONDecoder'>, and no subclass"),
        ("unfinished", "round_shapes:Unfinished", "cannot be used: the class does not define area"),
        ("circle", "round_shapes:Renamed", "the class has name = 'oval': give both the same name"),
        ("silent", "round_shapes:Silent", "cannot be used: the class has no summary"),
        ("a-circle", "round_shapes:Circle", "its name must consist of letters, digits and _"),
    ],
)
def test_plugin_that_cannot_be_used_is_told_and_harms_no_other(
    folder: Path, name: str, value: str, said: str
) -> None:
    offer(folder, "round-shapes", GROUP, {name: value, "other": "more_shapes:Other"}, ROUND)
    (folder / "broken_shapes.py").write_text("1 / 0")
    other = "from tests.core.test_plugins import Square\nclass Other(Square):\n    name = 'other'"
    (folder / "more_shapes.py").write_text(other)
    shapes = catalog()
    beginning = rf"the shape '{name}' of round-shapes 1.0 \(entry point {GROUP}: {name} = {value}\) "
    with pytest.raises(SettingError, match=beginning + ".*" + said):
        shapes[name]
    classes, reasons = shapes.load()
    assert (list(classes), list(reasons)) == (["square", "other"], [name])


def test_plain_names_have_nothing_to_confuse() -> None:
    assert plain_name("Top_K") == plain_name("top-k") == "topk"


def test_plugins_are_not_imported_with_offbeat(tmp_path: Path) -> None:
    """Neither the library nor its commands import a plugin that nobody asked for."""
    for group in ("strategies", "codecs", "tasks"):
        offer(
            tmp_path, f"eager-{group}", f"offbeat.{group}", {"eager": f"eager_{group}:Eager"}, "print(1 / 0)"
        )
    script = f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; import offbeat, offbeat.cli; "
    script += "from offbeat.cli.parse import strategy_of; strategy_of('bsp', ['codec=half']); "
    script += "from offbeat.strategies import STRATEGIES; assert 'eager' in STRATEGIES; "
    script += "print([name for name in sys.modules if name.startswith('eager')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
