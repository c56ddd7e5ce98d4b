"""The examples run, as the README says to run them; and so does the command line under torchrun."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.launched import run_ranks, torchrun

pytestmark = pytest.mark.processes


def test_minimal() -> None:
    error = float(torchrun("examples/minimal.py").split()[1].rstrip(";"))
    assert error < 0.1  # it starts at about 20


def test_checkpoint_resumes(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    assert run_ranks("examples/checkpoint.py", folder).strip() == "saved"
    assert run_ranks("examples/checkpoint.py", folder).strip() == "resumed and saved"


def test_command_line_under_torchrun(tmp_path: Path) -> None:
    torchrun("-m", "offbeat", "train", "digits", "--epochs", "1", "--out", str(tmp_path))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["workers"], summary["complete"], len(summary["per_worker"])) == (2, True, 2)
