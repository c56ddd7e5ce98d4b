"""The log of a run: a line of JSON per step, which adds up to the summary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offbeat.experiments.callbacks.jsonl import JsonLines
from tests.support.commands import simulate

pytestmark = pytest.mark.virtual


@pytest.mark.parametrize("strategy", ["bsp", "ssp"])
def test_a_line_a_step_adds_up_to_the_summary(tmp_path: Path, strategy: str) -> None:
    args = ["--strategy", strategy, "--steps", 8, "--evaluate-every", 4, "--work", "equal"]
    args += ["--cluster", "stragglers"]
    assert simulate(tmp_path, *args, "--log", tmp_path / "log.jsonl").code == 0
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    kinds = ["start", *["step"] * 4, "evaluation", *["step"] * 4, "evaluation"]
    assert [line["event"] for line in lines] == kinds
    steps = [line for line in lines if line["event"] == "step"]
    worker = json.loads((tmp_path / "summary.json").read_text())["per_worker"][0]
    assert [line["step"] for line in steps] == list(range(1, 9))
    assert sum(line["synced"] for line in steps) == worker["sync_steps"]
    if strategy == "ssp":
        assert max(line["staleness"] or 0 for line in steps) == worker["staleness_max"] > 0
    else:  # nothing is in flight after the last step
        for name in ("compute_s", "communicate_s", "wait_s", "bytes_sent", "samples"):
            assert sum(line[name] for line in steps) == pytest.approx(worker[name]), name


def test_a_full_disk_is_told_once_and_does_not_end_the_training(caplog: pytest.LogCaptureFixture) -> None:
    lines = JsonLines(Path("/dev/full"))
    for _ in range(3):
        lines._write("step", loss=1.0)
    lines.closed()
    assert caplog.text.count("/dev/full cannot be written") == 1
