"""`offbeat train`, `compare` and `list`, as a person would use them."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from offbeat.strategies import STRATEGIES
from tests.support.commands import offbeat
from tests.support.interrupted import interrupt
from tests.support.ports import free_port

pytestmark = pytest.mark.processes

# fields of summary.json: more may be added, none is ever renamed
FIELDS = [
    "strategy",
    "settings",
    "task",
    "world",
    "workers",
    "seed",
    "steps",
    "samples",
    "seconds",
    "samples_per_second",
    "bytes_sent",
    "sync_steps",
    "local_steps",
    "metric",
    "value",
    "best",
    "target",
    "seconds_to_target",
    "per_worker",
    "history",
]
WORKER_FIELDS = [
    "rank",
    "steps",
    "compute_s",
    "communicate_s",
    "wait_s",
    "bytes_sent",
    "staleness_mean",
    "staleness_max",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    """Two workers under everything that can be emulated; rank 1 is three times slower."""
    out = tmp_path_factory.mktemp("runs") / "train"
    emulated = ["--bandwidth", "200mbit", "--pace", "10ms", "--slow", "1=3.0"]
    job = ["--strategy", "local_sgd", "--set", "period=4", "--workers", 2, "--steps", 24, "--target", "0.05"]
    live = ["--log", out / "log.jsonl", "--dashboard"]
    done = offbeat("train", "digits", *job, "--evaluate-every", 8, *emulated, *live, "--out", out)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((out / "summary.json").read_text()), out


def test_the_summary_is_what_was_promised(trained: tuple[str, dict[str, Any], Path]) -> None:
    _, summary, _ = trained
    assert set(FIELDS) <= summary.keys()
    assert [set(WORKER_FIELDS) <= worker.keys() for worker in summary["per_worker"]] == [True, True]
    assert (summary["world"], summary["workers"], summary["steps"]) == ("processes", 2, 24)
    assert summary["settings"] == {
        "codec": None,
        "period": 4,
        "weighted": False,
        "first_moments": None,
        "second_moments": None,
    }
    assert summary["samples"] == 2 * 24 * 16
    assert (summary["sync_steps"], summary["local_steps"]) == (6, 18)
    assert [point["step"] for point in summary["history"]] == [8, 16, 24]
    assert summary["seconds_to_target"] == summary["history"][0]["seconds"]
    assert summary["seconds"] == summary["history"][-1]["seconds"]
    assert summary["complete"] is True
    assert summary["bytes_sent"] == sum(worker["bytes_sent"] for worker in summary["per_worker"])


def test_emulation_is_said_and_done(trained: tuple[str, dict[str, Any], Path]) -> None:
    said, summary, _ = trained
    assert len(summary["emulated"]) == 3
    assert all(note in said for note in summary["emulated"])
    fast, slow = summary["per_worker"]
    assert slow["compute_s"] >= 24 * 0.030, "24 steps of 10 ms, three times slower"
    assert fast["compute_s"] >= 24 * 0.010
    wire_s = summary["sync_steps"] * fast["bytes_sent"] / summary["sync_steps"] / (200e6 / 8)
    assert fast["communicate_s"] == pytest.approx(wire_s)


def test_details_and_a_line_a_step_lie_beside_the_summary(
    trained: tuple[str, dict[str, Any], Path],
) -> None:
    said, summary, out = trained
    details = json.loads((out / "details.json").read_text())
    assert details["command"].startswith("offbeat train digits --strategy local_sgd")
    assert details["decisions"]["synced"] == [int(step % 4 == 0) for step in range(1, 25)]
    fast, slow = details["timeline"]["workers"]
    assert {"computing", "waiting", "front"} <= {kind for kind, *_ in fast}
    assert {kind for kind, *_ in slow} >= {"computing", "front"}
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    assert [line["step"] for line in steps] == list(range(1, 25))
    assert sum(line["bytes_sent"] for line in steps) == summary["per_worker"][0]["bytes_sent"]
    assert "dashboard: http://127.0.0.1:" in said
    assert summary["bytes_to_target"] == summary["history"][0]["bytes_sent"] > 0


def test_an_interrupt_leaves_valid_partial_summaries(tmp_path: Path) -> None:
    job = ["--strategies", "bsp,local_sgd", "--workers", "2", "--steps", "100000", "--out", str(tmp_path)]
    said = interrupt(["compare", "digits", *job, "--evaluate-every", "5"], after="accuracy")
    kept = f"{tmp_path / 'summary.json'} and {tmp_path / 'report.html'}"
    assert f"interrupted: results so far are in {kept}\n" in said
    (known,) = json.loads((tmp_path / "summary.json").read_text())
    assert (known["strategy"], known["complete"], known["world"]) == ("bsp", False, "processes")
    assert known["steps"] >= 5
    assert known["history"]
    assert (tmp_path / "report.html").exists()


def test_nobody_stays_when_the_launcher_is_killed(tmp_path: Path) -> None:
    job = ["--workers", "2", "--steps", "1000000", "--evaluate-every", "5", "--out", str(tmp_path)]
    interrupt(["train", "digits", *job], after="accuracy", by=signal.SIGKILL)


def test_results_are_kept(trained: tuple[str, dict[str, Any], Path]) -> None:
    _, _, out = trained
    before = (out / "summary.json").read_text()
    done = offbeat("train", "digits", "--workers", 2, "--out", out)
    assert done.returncode == 2
    assert "--force" in done.stderr
    assert (out / "summary.json").read_text() == before


def test_compare_ends_in_a_table(tmp_path: Path) -> None:
    job = ["--strategies", "bsp,local_sgd", "--set", "local_sgd.period=5", "--workers", 2, "--steps", 10]
    done = offbeat("compare", "digits", *job, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    named = [row[0] for row in rows if row and row[0] in STRATEGIES]
    assert {"bsp", "local_sgd"} <= set(named)
    assert (tmp_path / "report.html").exists()
    bsp, local = json.loads((tmp_path / "summary.json").read_text())
    assert local["settings"]["period"] == 5
    assert bsp["bytes_sent"] > local["bytes_sent"] > 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train", "digits", "--strategy", "locl_sgd"], "did you mean 'local_sgd'?"),
        (["train", "digits", "--strategy", "local_sgd", "--set", "perod=3"], "did you mean 'period'?"),
        (["train", "digits", "--set", "period"], "key=value"),
        (["train", "digits", "--bandwidth", "fast"], "is not a rate"),
        (["train", "digits", "--pace", "soon"], "--pace 'soon'"),
        (["train", "digits", "--slow", "7=2.0"], "no rank 7 among 4 workers"),
        (["compare", "digits", "--set", "ssp.staleness=1", "--strategies", "bsp"], "name.key=value"),
        (["train", "mnist", "--data", "nowhere"], "OFFBEAT_DATA"),
    ],
)
def test_mistakes_are_told(arguments: list[str], told: str) -> None:
    done = offbeat(*arguments)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_launchers_rank_0_shows_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under torchrun on several hosts, here with one rank."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**place, "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    done = offbeat("train", "quadratic", "--steps", 2, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "training quadratic" in done.stdout and "1 worker on all hosts" in done.stdout
    assert "samples/s" in done.stdout, "the table of results"
    assert f"written: {tmp_path / 'run' / 'summary.json'}" in done.stdout.replace("\n", "")
