"""The examples run, as the README says to run them; and so does the command line under torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[1]


def torchrun(*command: str) -> str:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run([*launcher, *command], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_minimal() -> None:
    error = float(torchrun("examples/minimal.py").split()[1].rstrip(";"))
    assert error < 0.1  # it starts at about 20


def test_checkpoint_resumes(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    assert torchrun("examples/checkpoint.py", folder).strip() == "saved"
    assert torchrun("examples/checkpoint.py", folder).strip() == "resumed and saved"


def test_command_line_under_torchrun(tmp_path: Path) -> None:
    torchrun("-m", "offbeat", "train", "digits", "--epochs", "1", "--out", str(tmp_path))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["workers"], summary["complete"], len(summary["per_worker"])) == (2, True, 2)
