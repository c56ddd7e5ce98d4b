"""The rules that keep strategies free of wires and clocks, and files small."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

import offbeat
from offbeat.core.strategy import Strategy
from offbeat.strategies import STRATEGIES

SOURCE = Path(offbeat.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
STRATEGY_FILES = sorted((SOURCE / "strategies").glob("*.py"))
WIRES_AND_CLOCKS = {"torch.distributed", "time", "threading", "os", "asyncio", "random"}
ABOVE = {"offbeat.worlds", "offbeat.attach", "offbeat.cli"}
LONGEST = 400


def _named(path: Path) -> Iterator[str]:
    """Every module that a file imports, what it imports from it, and every dotted name that it uses."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: import by full name"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def _uses(path: Path, forbidden: set[str]) -> set[str]:
    return {bad for bad in forbidden for name in _named(path) if name == bad or name.startswith(f"{bad}.")}


def _ids(paths: list[Path]) -> list[str]:
    return [path.relative_to(SOURCE).as_posix() for path in paths]


@pytest.mark.parametrize("path", STRATEGY_FILES, ids=_ids(STRATEGY_FILES))
def test_strategies_know_no_wire_and_no_clock(path: Path) -> None:
    assert not _uses(path, WIRES_AND_CLOCKS | ABOVE)


@pytest.mark.parametrize(
    ("line", "bad"),
    [
        ("import time", "time"),
        ("import torch.distributed as dist", "torch.distributed"),
        ("from torch import distributed", "torch.distributed"),
        ("import torch\ntorch.distributed.barrier()", "torch.distributed"),
        ("from offbeat.worlds.processes.port import ProcessPort", "offbeat.worlds"),
        ("from offbeat import attach", "offbeat.attach"),
        ("def f():\n    from os import path", "os"),
    ],
)
def test_the_reader_of_imports_sees_them(tmp_path: Path, line: str, bad: str) -> None:
    (tmp_path / "bad.py").write_text(line)
    assert _uses(tmp_path / "bad.py", WIRES_AND_CLOCKS | ABOVE) == {bad}


@pytest.mark.parametrize("cls", STRATEGIES.values(), ids=STRATEGIES)
def test_strategies_are_of_one_form(cls: type[Strategy[object]]) -> None:
    assert cls.__name__ in offbeat.__all__
    assert getattr(offbeat, cls.__name__) is cls
    assert STRATEGIES[cls.name] is cls
    assert cls.summary
    assert cls.__doc__
    assert is_dataclass(cls)
    assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert all(field.kw_only for field in fields(cls))
    assert {"name", "summary"} <= vars(cls).keys()


@pytest.mark.parametrize("path", STRATEGY_FILES, ids=_ids(STRATEGY_FILES))
def test_strategy_files_open_with_what_they_do(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_every_strategy_file_is_in_the_table() -> None:
    files = {path.stem for path in STRATEGY_FILES} - {"__init__"}
    assert files == {cls.__module__.rpartition(".")[2] for cls in STRATEGIES.values()}


def test_files_are_small_and_say_what_they_are_for() -> None:
    assert {p.name for p in FILES if len(p.read_text(encoding="utf-8").splitlines()) > LONGEST} == set()
    assert not [p.name for p in FILES if p.stem in ("utils", "util", "helpers", "misc")]


def test_nothing_is_unpickled() -> None:
    pickles = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
    assert {p.name for p in FILES if _uses(p, pickles)} == set()


def test_what_is_loaded_is_data_only() -> None:
    """`torch.load` unpickles, unless told not to."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert "weights_only=True" in [ast.unparse(keyword) for keyword in node.keywords], path.name
