"""The provenance of a result: a command that can be repeated, and the versions that made it."""

from __future__ import annotations

import platform
import shlex
from datetime import UTC, datetime

import pytest
import torch

from offbeat.experiments.provenance import environment, origin


def test_the_command_can_be_typed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["train", "digits", "--out", "my runs/one", "--set", "codec=TopK(0.01)"]
    monkeypatch.setattr("sys.argv", ["/usr/bin/offbeat", *given])
    assert shlex.split(origin()["command"]) == ["offbeat", *given]


def test_the_time_is_in_utc_to_the_second() -> None:
    started = datetime.fromisoformat(origin()["started"])
    assert started.tzinfo == UTC and started.microsecond == 0


def test_the_environment_names_versions_and_machine() -> None:
    found = environment()
    assert found["torch"] == torch.__version__ and found["python"] == platform.python_version()
    assert found["threads"] == str(torch.get_num_threads())
    assert ("GPU" in found) is torch.cuda.is_available()
    assert all(isinstance(value, str) and value for value in found.values())
    assert origin()["environment"] == found
