"""Outputs of a running job: options in the help, and outputs refused before training starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import command, simulate

pytestmark = pytest.mark.virtual


def test_a_log_is_not_overwritten(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("mine")
    said = simulate(tmp_path / "out", "--log", log)
    assert said.code == 2
    assert f"{log} exists" in said.err
    assert log.read_text() == "mine"
    assert simulate(tmp_path / "out", "--log", log, "--force").code == 0


def test_the_options_are_in_the_help() -> None:
    for name in ("train", "simulate"):
        said = command(name, "--help")
        assert all(option in said.out for option in ("--log", "--tensorboard", "--dashboard"))
