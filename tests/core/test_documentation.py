"""What `help()` shows of strategies and codecs: every setting, its default and a sentence."""

from __future__ import annotations

import pydoc
from typing import Any

import pytest

import offbeat
from offbeat.core.settings import Settings, schema

CLASSES = [
    cls
    for name in offbeat.__all__
    if isinstance(cls := getattr(offbeat, name), type) and issubclass(cls, Settings) and schema(cls)
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_help_explains_every_setting_of_every_strategy_and_codec(cls: type[Any]) -> None:
    shown = pydoc.render_doc(cls, renderer=pydoc.plaintext)
    first = next(line for line in shown.splitlines() if line.startswith(f" |  {cls.__name__}("))
    assert "Annotated" not in first
    assert [line for line in shown.splitlines() if "__init__(" in line and "Annotated" in line] == []
    for declared in schema(cls).values():
        assert len(declared.field.help.split()) >= 2, declared
        assert f"{declared.attribute}" in first
        lines = [line for line in shown.splitlines() if line.strip(" |").startswith(declared.attribute)]
        assert any(line.endswith(f": {declared.field.help}") for line in lines), declared.attribute


def test_strategies_and_codecs_are_all_there() -> None:
    assert {"BSP", "SSP", "Oscars", "TopK", "Quantize", "ErrorFeedback", "GDTopK"} <= {
        cls.__name__ for cls in CLASSES
    }


def test_a_class_is_documented_once() -> None:
    assert str(getattr(offbeat, "SSP").__doc__).count("Settings:") == 1  # noqa: B009
