"""The release: one version in all places, types for users, and a torch that is tested."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def test_all_files_name_the_same_version() -> None:
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE)
    newest = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert cited is not None
    assert cited[1] == newest[0] == PROJECT["version"]


def test_types_are_shipped_and_said() -> None:
    assert (ROOT / "src" / "offbeat" / "py.typed").exists()
    assert "Typing :: Typed" in PROJECT["classifiers"]


def test_the_torch_that_is_installed_here_is_allowed() -> None:
    (oldest,) = (part[len("torch>=") :] for part in PROJECT["dependencies"] if part.startswith("torch>="))
    (pinned,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    assert tuple(map(int, oldest.split("."))) <= tuple(map(int, pinned.split(".")))


def test_the_page_on_installing_names_the_oldest_torch() -> None:
    (oldest,) = (part[len("torch>=") :] for part in PROJECT["dependencies"] if part.startswith("torch>="))
    assert f"torch {oldest} or newer" in (ROOT / "docs" / "install.md").read_text("utf-8")


def test_python_versions_agree() -> None:
    needed = PROJECT["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {needed}" in PROJECT["classifiers"]
    assert f"Python {needed} or newer" in (ROOT / "docs" / "install.md").read_text("utf-8")


def test_the_page_on_installing_has_every_extra() -> None:
    page = (ROOT / "docs" / "install.md").read_text("utf-8")
    assert [extra for extra in PROJECT["optional-dependencies"] if f"`offbeat[{extra}]`" not in page] == []


def test_an_address_is_in_all_places_or_in_none() -> None:
    cited = "repository-code:" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert cited == bool(PROJECT.get("urls"))
