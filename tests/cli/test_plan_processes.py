"""offbeat plan on real ranks, and train --from what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offbeat.experiments.planner.candidates import candidates
from offbeat.experiments.planner.plan_file import load_plan
from tests.support.commands import command

pytestmark = pytest.mark.processes


def test_two_ranks_are_measured_and_train_by_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    emulated = ["--pace", "5ms", "--slow", "1=2.0"]
    job = [
        "--steps",
        24,
        "--evaluate-every",
        4,
        "--target",
        0.3,
        "--most-seeds",
        1,
        "--strategies",
        "local_sgd",
        "--out",
        file,
    ]
    said = command("plan", "digits", "--workers", 2, *emulated, "--probe-steps", 3, *job)
    assert said.code == 0, said.err
    tried = len(candidates(["local_sgd"]))
    assert f"{tried} of {tried}: local_sgd" in said.out
    read = load_plan(file)
    assert read.measured is not None
    assert read.measured.size == 2
    assert [group.step_s.measured_s[0] > 0.005 for group in read.measured.workers] == [True, True]  # type: ignore[union-attr]
    codecs = [f"error_feedback(quantize({bits}))" for bits in (4, 8)]
    assert [cost.codec for cost in read.measured.codecs] == codecs
    assert all(cost.encode_s > 0 for cost in read.measured.codecs)
    said = command("train", "--from", file, "--out", tmp_path / "run")
    assert said.code == 0, said.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["strategy"], summary["workers"], summary["steps"]) == (read.strategy, 2, 24)
    assert summary["target"] == 0.3
    assert summary["settings"] == read.make_strategy().settings()
    assert len(summary["emulated"]) == 2
