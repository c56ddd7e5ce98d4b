"""offbeat simulate: what it writes, what it shows, and that a valid summary is left whatever happens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offbeat.worlds.virtual.cluster import preset_names
from tests.support.commands import WORKERS, command, simulate, summary_of
from tests.support.interrupted import interrupt

pytestmark = pytest.mark.virtual


def test_a_summary_says_what_was_run_and_what_came_of_it(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(WORKERS)  # 0.1 s a step, 1 Gbit/s, no latency
    args = ["--cluster", tmp_path / "mine.toml", "--strategy", "local_sgd", "--set", "period=3"]
    more = ["--workers", 4, "--steps", 10, "--seed", 5, "--evaluate-every", 4, "--target", 1e6]
    said = simulate(tmp_path / "out", *args, *more, "--trace", tmp_path / "trace.json")
    assert said.code == 0, said.err
    summary = summary_of(tmp_path / "out")
    assert summary["strategy"] == "local_sgd"
    assert summary["settings"] == {
        "codec": None,
        "period": 3,
        "weighted": False,
        "first_moments": None,
        "second_moments": None,
    }
    assert (summary["task"], summary["world"], summary["complete"]) == ("quadratic", "virtual", True)
    assert (summary["workers"], summary["seed"], summary["steps"]) == (4, 5, 10)
    assert (summary["sync_steps"], summary["local_steps"]) == (3, 7)
    assert [point["step"] for point in summary["history"]] == [4, 8, 10]
    assert summary["seconds"] == summary["history"][-1]["seconds"] > 1
    assert summary["seconds_to_target"] == summary["history"][0]["seconds"]
    assert summary["bytes_sent"] == sum(worker["bytes_sent"] for worker in summary["per_worker"])
    assert summary["samples"] == 4 * 10 * 8
    assert summary["samples_per_second"] == pytest.approx(320 / summary["seconds"])
    assert summary["best"] == min(point["value"] for point in summary["history"])
    assert [worker["rank"] for worker in summary["per_worker"]] == [0, 1, 2, 3]
    for worker in summary["per_worker"]:
        assert worker["compute_s"] == pytest.approx(1.0)
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    shown = " ".join(said.out.split())
    assert "virtual: 4 workers on" in shown
    assert "period=3" in shown
    assert "virtual seconds in" in shown
    assert "written: " in shown


def test_what_a_replica_scores_is_shown(tmp_path: Path) -> None:
    args = [
        "--strategy",
        "selsync",
        "--set",
        "aggregate=gradients",
        "--set",
        "window=2",
        "--set",
        "delta=1e9",
    ]
    said = simulate(tmp_path / "out", *args, "--workers", 3, "--steps", 6)
    own = summary_of(tmp_path / "out")["replica_value"]
    assert f"worker 0's own weights: {own:.4g}" in " ".join((said.out + said.err).split())


def test_the_same_command_writes_the_same_summary(tmp_path: Path) -> None:
    for name in ("one", "two"):
        said = simulate(tmp_path / name, "--cluster", "stragglers", "--workers", 20, "--steps", 5)
        assert said.code == 0
    one, two = ((tmp_path / name / "summary.json").read_text() for name in ("one", "two"))
    assert one == two


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_runs(tmp_path: Path, preset: str) -> None:
    assert simulate(tmp_path, "--cluster", preset, "--workers", 5).code == 0
    assert summary_of(tmp_path)["cluster"] == preset


def test_a_run_that_diverges_still_leaves_json(tmp_path: Path) -> None:
    assert simulate(tmp_path, "--lr", 1e30, "--steps", 4).code == 0
    summary = summary_of(tmp_path)
    assert summary["complete"]
    assert len(summary["history"]) == 1


def test_a_cluster_that_gets_stuck_is_told_and_leaves_what_was_known(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(f"{WORKERS}[[away]]\nworker = 0\nfrom_s = 0.25\n")
    said = simulate(tmp_path, "--cluster", tmp_path / "mine.toml", "--steps", 9, "--evaluate-every", 2)
    assert said.code == 2
    assert "worker 0 waits for nothing: it left for good at 0.25 s" in said.err
    assert "worker 1 waits for operation" in said.err
    summary = summary_of(tmp_path)
    assert not summary["complete"]
    assert [point["step"] for point in summary["history"]] == [2]


def test_an_interrupt_leaves_a_valid_partial_summary(tmp_path: Path) -> None:
    args = ["simulate", "quadratic", "--workers", "200", "--steps", "100000", "--out", str(tmp_path)]
    said = interrupt([*args], after="bsp step")
    assert f"interrupted: results so far are in {tmp_path / 'summary.json'}\n" in said
    summary = summary_of(tmp_path)
    assert not summary["complete"]
    assert 1 <= summary["steps"] < 100_000
    assert len(summary["per_worker"]) == 200


def test_help_names_every_option() -> None:
    said = command("simulate", "--help")
    assert said.code == 0
    for option in ("--cluster", "--strategy", "--set", "--workers", "--trace", "--force"):
        assert option in said.out


def test_the_order_of_the_data_is_an_option(tmp_path: Path) -> None:
    common = ("simulate", "digits", "--workers", 4, "--steps", 6, "--strategy", "selsync")
    drawn = {}
    for name, args in {
        "plain": [],
        "seldp": ["--order", "seldp"],
        "skewed": ["--order", "defdp", "--skew", 3, "--inject", "0.5,0.5"],
    }.items():
        said = command(*common, *args, "--out", tmp_path / name)
        assert said.code == 0, said.err
        drawn[name] = summary_of(tmp_path / name)
    assert [drawn["skewed"][what] for what in ("order", "skew", "inject")] == ["defdp", 3, [0.5, 0.5]]
    assert [drawn["plain"][what] for what in ("order", "skew", "inject")] == ["shuffled", None, None]
    assert len({run["history"][-1]["loss"] for run in drawn.values()}) == 3
    assert (drawn["plain"]["lssr"], drawn["plain"]["sync_steps"]) == (0.0, 6)


def test_a_run_that_never_began_leaves_no_results(tmp_path: Path) -> None:
    said = command("simulate", "digits", "--workers", 1500, "--steps", 1, "--out", tmp_path / "out")
    assert said.code == 2
    assert "1500 workers, but only 1437 samples" in said.err
    assert not (tmp_path / "out" / "summary.json").exists()
