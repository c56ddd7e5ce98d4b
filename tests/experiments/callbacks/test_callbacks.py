"""What a run tells while it goes on: a line a step, TensorBoard, a page that follows it."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from offbeat.experiments.callbacks.dashboard import EVERY_S, straggler
from offbeat.experiments.loop import Evaluation
from tests.support.commands import command, simulate
from tests.support.dashboard_stage import Stage
from tests.support.limits import HANG_S

pytestmark = pytest.mark.virtual


@pytest.mark.parametrize("strategy", ["bsp", "ssp"])
def test_a_line_a_step_adds_up_to_the_summary(tmp_path: Path, strategy: str) -> None:
    args = ["--strategy", strategy, "--steps", 8, "--evaluate-every", 4, "--cluster", "stragglers"]
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


def test_a_log_is_not_overwritten(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("mine")
    said = simulate(tmp_path / "out", "--log", log)
    assert said.code == 2
    assert f"{log} exists" in said.err
    assert log.read_text() == "mine"
    assert simulate(tmp_path / "out", "--log", log, "--force").code == 0


def test_tensorboard_is_written_or_asked_for(tmp_path: Path) -> None:
    said = simulate(tmp_path / "out", "--tensorboard", tmp_path / "logs")
    if find_spec("tensorboard") is None:
        assert said.code == 2
        assert "pip install 'offbeat[tensorboard]'" in said.err
        assert not (tmp_path / "out").exists()
    else:
        assert said.code == 0, said.err
        assert list((tmp_path / "logs").glob("events.out.tfevents.*"))


# --- the dashboard


@pytest.fixture
def stage() -> Any:
    stage = Stage()
    yield stage
    stage.dashboard.closed()


def test_a_snapshot_tells_of_every_worker_and_names_the_straggler(stage: Stage) -> None:
    stage.go(10, 1.0, 3.0, 1.0, seconds=4.0)
    first = stage.state()
    assert (first["step"], first["total_steps"], first["loss"]) == (10, 100, 0.25)
    assert first["straggler"] == "rank 1 on there"
    assert [w["name"] for w in first["workers"]] == ["rank 0 on here", "rank 1 on there", "rank 2"]
    assert [w["waiting"] for w in first["workers"]] == pytest.approx([0.75, 0.25, 0.75])
    assert [w["steps_per_s"] for w in first["workers"]] == pytest.approx([2.5] * 3)
    stage.go(30, 3.0, 5.2, 3.0, seconds=8.0)
    later = stage.state()
    assert later["straggler"] is None, "it has recovered: only lately counts"
    assert [w["steps_per_s"] for w in later["workers"]] == pytest.approx([5.0] * 3)


def test_it_looks_no_more_often_than_it_must(stage: Stage) -> None:
    for step in range(1, 20):
        stage.go(step, 0.1, 0.1, 0.1, seconds=1.0 + step * EVERY_S / 10)
    assert stage.looks == 2


def test_events_come_as_they_happen_and_end_with_training(stage: Stage) -> None:
    stage.go(1, 0.1, 0.1, 0.1, seconds=1.0)
    heard: list[str] = []
    first = threading.Event()

    def follow() -> None:
        with urllib.request.urlopen(stage.dashboard.url + "events", timeout=HANG_S) as answer:
            assert answer.headers["Content-Type"] == "text/event-stream"
            for line in answer:
                heard.append(line.decode().strip())
                first.set()

    reader = threading.Thread(target=follow)
    reader.start()
    assert first.wait(HANG_S)
    stage.dashboard.evaluated([Evaluation(5, 2.0, 0.5, 0.75)], stage.entries)
    stage.dashboard.closed()
    reader.join(HANG_S)
    assert not reader.is_alive()
    events = [json.loads(line[6:]) for line in heard if line.startswith("data: ")]
    assert [line for line in heard if line.startswith("event: ")][-1] == "event: end"
    assert events[0]["step"] in (1, 5)
    assert events[-2]["history"] == [{"step": 5, "seconds": 2.0, "loss": 0.5, "value": 0.75}]
    stage.dashboard = Stage().dashboard  # for the fixture to close


def test_it_is_for_this_machine_alone(stage: Stage) -> None:
    assert stage.dashboard.url.startswith("http://127.0.0.1:")
    assert "<!doctype html>" in stage.get("")
    with pytest.raises(urllib.error.HTTPError, match="403") as refused:
        stage.get("state", Host="evil.example:80")
    refused.value.close()
    with pytest.raises(urllib.error.HTTPError, match="404") as unknown:
        stage.get("passwords")
    unknown.value.close()


def test_a_port_that_is_taken_is_told(stage: Stage, tmp_path: Path) -> None:
    port = stage.dashboard.url.rstrip("/").rpartition(":")[2]
    said = simulate(tmp_path, "--dashboard", "--dashboard-port", port)
    assert said.code == 2
    assert f"--dashboard-port {port} cannot be used" in said.err


def test_training_ends_though_a_page_is_open(tmp_path: Path) -> None:
    said = simulate(tmp_path, "--dashboard")
    assert said.code == 0, said.err
    assert "dashboard: http://127.0.0.1:" in said.out
    assert json.loads((tmp_path / "summary.json").read_text())["complete"]


@pytest.mark.parametrize(
    ("computes_s", "named"),
    [([0.1], None), ([0.1, 0.12], None), ([0.1, 0.2], "1"), ([0.3, 0.1, 0.1], "0"), ([0.0, 0.0], None)],
)
def test_a_straggler_is_named_only_if_it_stands_out(computes_s: list[float], named: str | None) -> None:
    assert straggler([{"name": str(n), "step_compute_s": c} for n, c in enumerate(computes_s)]) == named


def test_the_options_are_in_the_help() -> None:
    for name in ("train", "simulate"):
        said = command(name, "--help")
        assert all(option in said.out for option in ("--log", "--tensorboard", "--dashboard"))
