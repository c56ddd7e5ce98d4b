"""The command line as a whole: a mistake is told in a sentence, with the option that helps."""

from __future__ import annotations

from pathlib import Path

import pytest

import offbeat
from offbeat.cli import COMMANDS, app
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


def test_the_version_is_that_of_the_package() -> None:
    for option in ("--version", "-V"):
        said = command(option)
        assert (said.code, said.out) == (0, f"offbeat {offbeat.__version__}\n")


def test_a_shell_can_complete_commands() -> None:
    said = command("--help")
    assert "--install-completion" in said.out
    assert {each.name for each in app.registered_commands} == set(COMMANDS)


def test_usual_options_have_short_names(tmp_path: Path) -> None:
    short = ("-w", 2, "-s", "local_sgd", "-c", "slow-lan", "-o", tmp_path, "-q")
    said = command("simulate", "quadratic", "--steps", 2, *short)
    assert said.code == 0, said.err
    assert "local_sgd" in said.out
    assert (tmp_path / "summary.json").exists()
    assert command("simulate", "quadratic", "--steps", 2, *short, "-f").code == 0


def test_quiet_shows_the_results_alone(tmp_path: Path) -> None:
    args = ("simulate", "quadratic", "--workers", 2, "--steps", 2, "--out")
    loud, quiet = command(*args, tmp_path / "a"), command(*args, tmp_path / "b", "--quiet")
    assert "bsp step" in loud.out
    assert "bsp step" not in quiet.out
    assert "virtual: 2 workers" not in quiet.out
    assert f"written: {tmp_path / 'b' / 'summary.json'}" in quiet.out
