"""Strategies are of one form: a file or a folder each, and in the table."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

import offbeat
from offbeat.core.strategy import Strategy
from offbeat.strategies import STRATEGIES
from tests.support.source import Package, SourceFile

NO_STRATEGY = {"push_pull"}  # a base class of strategies


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


def test_every_strategy_is_a_file_or_a_folder_of_its_own_and_in_the_table() -> None:
    def is_top_level(file: SourceFile) -> bool:
        return file.room == "strategies" and len(file.parts) == 2

    offbeat_files = Package(Path(offbeat.__file__).parent).files
    found = {file.name for file in offbeat_files.values() if is_top_level(file)}
    assert found - {f"offbeat.strategies.{name}" for name in NO_STRATEGY} == {
        cls.__module__ for cls in STRATEGIES.values()
    }
