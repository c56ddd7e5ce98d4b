"""Loading of runs from folders, and folders that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbeat.errors import SettingError
from offbeat.experiments.report.load import load, load_all
from tests.support.run_folders import run_folder


def test_what_is_no_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"holds no summary\.json"):
        load(tmp_path)
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(SettingError, match="not the summary of an offbeat run"):
        load(tmp_path)
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(SettingError, match="cannot be read"):
        load(tmp_path)
    (tmp_path / "summary.json").write_text("[]")
    with pytest.raises(SettingError, match="no runs"):
        load_all([tmp_path])


def test_runs_of_two_tasks_are_refused(tmp_path: Path) -> None:
    folders = [run_folder(tmp_path / name, task=name) for name in ("digits", "mnist")]
    with pytest.raises(SettingError, match=r"one task and metric, but these are of digits .*, mnist"):
        load_all(folders)
