"""offbeat report: one page from the folders of several runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import command, compare

pytestmark = pytest.mark.virtual


def test_a_page_of_runs_from_several_folders(tmp_path: Path) -> None:
    for seed in (0, 1):
        done = ["--workers", 2, "--steps", 4, "--seed", seed, "--out", tmp_path / f"run{seed}"]
        assert command("simulate", "quadratic", *done).code == 0
    assert compare(tmp_path / "both", "--steps", 4, "--evaluate-every", 4).code == 0
    said = command(
        "report", *(tmp_path / name for name in ("run0", "run1", "both")), "--out", tmp_path / "p.html"
    )
    assert said.code == 0, said.err
    rows = [line.split()[0] for line in said.out.splitlines() if line.strip()]
    assert sorted(row for row in rows if row in ("bsp", "local_sgd")) == ["bsp", "local_sgd"], (
        "three runs of bsp are one row"
    )
    assert (tmp_path / "p.html").exists()
