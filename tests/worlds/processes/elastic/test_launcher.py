"""The elastic launcher: a worker that dies is started again, joins the others, and all end alike."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from offbeat import BSP
from offbeat.errors import LaunchError, SettingError
from offbeat.worlds.processes.elastic.launcher import launch_elastic
from offbeat.worlds.processes.elastic.registry import MEMBER
from offbeat.worlds.processes.server.auth import TOKEN
from tests.support.elastic import AfterReturn, Deed, train_bowl

pytestmark = pytest.mark.processes


def train_and_die_once(folder: Path) -> None:
    member = os.environ[MEMBER]
    deeds = [Deed(1, "launched", 3)] if member == "rank0001-0" else []
    result = train_bowl(lambda said: None, BSP(), AfterReturn(3, 4), deeds)
    (folder / member).write_text(json.dumps(result))


def test_worker_that_dies_is_started_again_and_joins(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch_elastic(3, 2, train_and_die_once, tmp_path) == ["rank 1 was ended by SIGKILL"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0000-0", "rank0001-1", "rank0002-0"]
    results = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert len({tuple(result["weights"]) for result in results.values()}) == 1
    assert results["rank0001-1"]["joined_at"] >= 3
    assert "rank 1 was ended by SIGKILL, starting it again (2 workers go on)" in capfd.readouterr().err


def leave_the_token(folder: Path) -> None:
    (folder / os.environ["RANK"]).write_text(os.environ[TOKEN])


def test_all_workers_have_a_new_token_to_sign_with_unless_one_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    launch_elastic(2, 0, leave_the_token, tmp_path)
    first, second = ((tmp_path / rank).read_text() for rank in "01")
    assert first == second and len(first) == 64
    assert TOKEN not in os.environ
    monkeypatch.setenv(TOKEN, "given")
    launch_elastic(1, 0, leave_the_token, tmp_path)
    assert (tmp_path / "0").read_text() == "given"


def fail() -> None:
    raise SettingError("lr=0: a finite number above 0")


def test_nobody_ends_well(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchError, match=r"no worker ended well: rank \d failed with exit code 1"):
        launch_elastic(2, 1, fail)
    assert capfd.readouterr().err.count(", starting it again") == 2, "each was started twice"
