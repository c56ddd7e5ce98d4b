"""The command line as a whole: a mistake is told in a sentence, with the option that helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import command

pytestmark = pytest.mark.virtual


def test_an_unknown_task_is_told() -> None:
    said = command("simulate", "quadratik")
    assert (said.code, said.out) == (2, "")
    assert "did you mean 'quadratic'?" in said.err


def test_missing_data_names_the_options_that_help(tmp_path: Path) -> None:
    said = command("simulate", "mnist", "--data", tmp_path, "--out", tmp_path / "out")
    assert said.code == 2
    assert f"none of its files is in {tmp_path / 'mnist'} or in {tmp_path}" in said.err
    assert "`offbeat data mnist --data DIR --download` fetches what is missing" in said.err
