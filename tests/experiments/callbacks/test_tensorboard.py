"""Curves for TensorBoard, as event files."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.commands import simulate

pytestmark = pytest.mark.virtual


def test_tensorboard_is_written_or_asked_for(tmp_path: Path) -> None:
    said = simulate(tmp_path / "out", "--tensorboard", tmp_path / "logs")
    if find_spec("tensorboard") is None:
        assert said.code == 2
        assert "pip install 'offbeat[tensorboard]'" in said.err
        assert not (tmp_path / "out").exists()
    else:
        assert said.code == 0, said.err
        assert list((tmp_path / "logs").glob("events.out.tfevents.*"))
