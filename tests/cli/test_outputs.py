"""Outputs of a running job: options in the help, and outputs refused before training starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from offbeat import BSP
from offbeat.cli.options import LiveOutputs
from offbeat.cli.outputs import RunCallbacks
from offbeat.errors import SettingError
from offbeat.experiments.job import Job
from offbeat.experiments.tasks.quadratic import Quadratic
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


def test_every_output_is_a_callback_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live = LiveOutputs(log=tmp_path / "deep" / "log.jsonl", dashboard=True)
    callbacks = RunCallbacks(live)(list)
    assert [type(callback).__name__ for callback in callbacks] == ["Display", "JsonLines", "Dashboard"]
    callbacks[-1].started(Job(task=Quadratic(), strategy=BSP(), workers=1), 10)
    assert "dashboard: http://127.0.0.1:" in capsys.readouterr().out
    for callback in callbacks[1:]:
        callback.closed()
    assert (tmp_path / "deep" / "log.jsonl").exists()
    assert [type(callback).__name__ for callback in RunCallbacks()(list)] == ["Display"]


def test_a_port_of_the_dashboard_asks_for_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    callbacks = RunCallbacks(LiveOutputs(quiet=True, dashboard_port=free))(list)
    assert [type(callback).__name__ for callback in callbacks] == ["Dashboard"]
    callbacks[0].closed()


def test_outputs_that_cannot_be_written_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SettingError, match="exists"):
        LiveOutputs(log=tmp_path / "file").check(force=False)
    LiveOutputs(log=tmp_path / "file").check(force=True)
    monkeypatch.setattr("offbeat.cli.options.find_spec", lambda name: None)
    with pytest.raises(SettingError, match=r"--tensorboard needs .* pip install 'offbeat\[tensorboard\]'"):
        LiveOutputs(tensorboard=tmp_path).check(force=False)
    monkeypatch.setattr("offbeat.cli.options.find_spec", lambda name: name)
    with pytest.raises(SettingError, match=r"file is a file: give a folder"):
        LiveOutputs(tensorboard=tmp_path / "file").check(force=False)
