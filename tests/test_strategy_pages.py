"""Pages of strategies: seven parts in one order, all settings, and a picture made from a run."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from offbeat.core.settings import schema
from offbeat.experiments.report.aggregate import changed
from offbeat.strategies import STRATEGIES

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "strategies"
PARTS = ["Rule", "Picture", "When to use it", "When not", "Settings", "Measured", "Paper"]
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
RESULT = re.compile(r"benchmarks/results|peers\.md|`offbeat |not measured to the end", re.IGNORECASE)
SOURCE = re.compile(r"\(https://|no free copy|[Nn]o paper|follows none|Only the abstract")


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "site" / "pictures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sections(name: str) -> dict[str, str]:
    """The text below each heading of a page, in order."""
    text = FENCE.sub("", (FOLDER / f"{name}.md").read_text("utf-8"))
    _, *parts = HEADING.split(text)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("name", STRATEGIES.own)
def test_a_page_has_seven_parts_in_this_order_and_none_is_empty(name: str) -> None:
    found = sections(name)
    assert list(found)[: len(PARTS)] == PARTS
    assert all(len(found[part].split()) >= 10 for part in PARTS if part != "Rule")
    assert f"]({name}.svg)" in found["Picture"]
    assert found["When not"].strip().startswith("- "), "one reason per line"
    assert RESULT.search(found["Measured"]), "figures have their source; otherwise say that there are none"
    assert SOURCE.search(found["Paper"]), "a link, or why there is none"


@pytest.mark.parametrize("name", STRATEGIES.own)
def test_a_page_explains_every_setting(name: str) -> None:
    text = sections(name)["Settings"]
    for declared in schema(STRATEGIES.own[name]).values():
        assert re.search(rf"^\|.*`{declared.attribute}`.*\|", text, re.MULTILINE), declared.attribute


@pytest.mark.virtual
@pytest.mark.parametrize("name", STRATEGIES.own)
def test_a_picture_shows_what_the_strategy_does(name: str, pictures: ModuleType) -> None:
    said = sections(name)["Picture"]
    strategy: Any = pictures.SCENES[name][0]
    call = re.search(r"`(\w+)\((.*?)\)`", said)
    assert call is not None and call[1] == type(strategy).__name__
    assert [part for part in call[2].split(", ") if part] == changed(name, strategy.settings())
    shown = (FOLDER / f"{name}.svg").read_text("utf-8")
    assert shown == pictures.picture(name), "run python docs/site/pictures.py, and look at the picture"
