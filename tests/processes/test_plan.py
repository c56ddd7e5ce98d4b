"""offbeat plan on real ranks, and train --from what it wrote."""

from __future__ import annotations

from pathlib import Path

from offbeat.plans.file import load_plan
from tests.processes.test_cli import offbeat
from tests.virtual.test_bad_input import command
from tests.virtual.test_cli import summary_of


def test_two_ranks_are_measured_and_train_by_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    args = [
        "--workers",
        2,
        "--pace",
        "5ms",
        "--slow",
        "1=2.0",
        "--probe-steps",
        3,
        "--strategies",
        "local_sgd",
    ]
    job = ["--steps", 12, "--evaluate-every", 4, "--target", 0.05, "--out", file]
    done = offbeat("plan", "digits", *args, *job)
    assert done.returncode == 0, done.stderr
    assert "rank 1: " in done.stdout
    assert "6 of 6: local_sgd period=32" in done.stdout
    read = load_plan(file)
    assert read.measured is not None
    assert read.measured.size == 2
    assert [group.step_s.measured_s[0] > 0.005 for group in read.measured.workers] == [True, True]  # type: ignore[union-attr]
    said = command("train", "--from", file, "--out", tmp_path / "run")
    assert said.code == 0, said.err
    summary = summary_of(tmp_path / "run")
    assert (summary["strategy"], summary["workers"], summary["steps"]) == (read.strategy, 2, 12)
    assert summary["target"] == 0.05
    assert summary["settings"] == read.make_strategy().settings()
    assert len(summary["emulated"]) == 2
