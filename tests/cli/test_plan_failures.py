"""offbeat plan and simulate for workers that fail, and what they cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from offbeat.experiments.planner.plan_file import load_plan
from tests.support.commands import Said, command

pytestmark = pytest.mark.virtual

TRACE = {"metadata": {"gap_seconds": 0.5}, "data": [1, 1, 1, 1, 0, 1, 1, 1]}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "spot.json"
    file.write_text(json.dumps(TRACE))
    return file


def plan(out: Path, *args: object) -> Said:
    small = ("--workers", 4, "--steps", 24, "--evaluate-every", 4, "--target", 20, "--out", out)
    tried = ("--strategies", "local_sgd,ssp,ssd_sgd", "--most-seeds", 2)
    return command("plan", "quadratic", "--cluster", "lan-1g", *tried, *small, *args)


def test_a_plan_for_workers_that_fail_has_goodput_and_money(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    said = plan(file, "--mtbf", "0.1min", "--rejoin", "400ms", "--price", "$3600/h")
    assert said.code == 0, said.err
    read = load_plan(file)
    assert (read.mtbf, read.rejoin, read.price) == ("0.1min", "400ms", "$3600/h")
    shown = " ".join(said.out.split())
    for word in ("samples/s", "cost", "the cheapest: "):
        assert word in shown
    for each in read.ranking:
        if each.seconds_to_target is not None:
            assert each.goodput is not None and each.goodput > 0
            assert each.cost == pytest.approx(4 * each.seconds_to_target), "4 machines at 1 a second, kept"
    assert read.elastic == (read.make_strategy().server_half() is None)
    assert not {"mtbf", "rejoin", "price", "spot_trace", "trace"} & read.options().keys()


def test_a_trace_takes_workers_away_and_what_is_away_costs_nothing(tmp_path: Path, trace: Path) -> None:
    file = tmp_path / "plan.toml"
    often = {"metadata": {"gap_seconds": 0.05}, "data": [1, 1, 1, 0, 0]}
    trace.write_text(json.dumps(often))
    said = plan(file, "--trace", trace, "--price", "3600/h")
    assert said.code == 0, said.err
    assert json.loads(trace.read_text()) == often, "no timeline was written over it"
    read = load_plan(file)
    assert read.spot_trace == str(trace)
    costs = [(each.cost, each.seconds_to_target) for each in read.ranking if each.cost is not None]
    assert costs and all(cost <= 4 * (seconds or 0.0) for cost, seconds in costs)
    assert any(cost < 3.999 * (seconds or 0.0) for cost, seconds in costs), "somebody was away"


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--mtbf", "2h"], "--mtbf and --rejoin belong together"),
        (["--rejoin", "90s"], "--mtbf and --rejoin belong together"),
        (["--mtbf", "soon", "--rejoin", "90s"], "--mtbf 'soon': write a time above 0"),
        (["--mtbf", "2h", "--rejoin", "0s"], "--rejoin '0s': write a time above 0"),
        (["--price", "cheap"], "--price 'cheap': write a price of a machine for an hour"),
        (["--trace", "none.json"], "none.json: the trace cannot be read"),
        (["--trace", "none.json", "--mtbf", "2h"], "and so does a trace: give one"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_a_mistake_is_told_before_anything_runs(tmp_path: Path, args: list[object], problem: str) -> None:
    said = plan(tmp_path / "plan.toml", *args)
    assert (said.code, said.out) == (2, "")
    assert problem in said.err


def simulate(out: Path, *args: object) -> Said:
    small = ("--workers", 4, "--cluster", "lan-1g", "--evaluate-every", 20, "--out", out)
    return command("simulate", "quadratic", *small, *args)


def summary_of(out: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return read


def test_simulate_takes_a_trace_too(tmp_path: Path, trace: Path) -> None:
    said = simulate(tmp_path / "a", "--steps", 40, "--elastic", "--spot-trace", trace)
    assert said.code == 0, said.err
    summary = summary_of(tmp_path / "a")
    assert summary["cluster"] == "lan-1g"
    assert summary["rosters"] > 1, "somebody died"
    assert simulate(tmp_path / "b", "--steps", 40, "--spot-trace", trace).code == 0
    assert summary_of(tmp_path / "b")["seconds"] > summary_of(tmp_path / "a")["seconds"], "all wait"
    trace.write_text(json.dumps({"metadata": {"gap_seconds": 0.3}, "data": [1, 1, 0] * 5}))
    assert simulate(tmp_path / "c", "--steps", 40, "--strategy", "asp", "--spot-trace", trace).code == 0
    steps = [worker["steps"] for worker in summary_of(tmp_path / "c")["per_worker"]]
    assert steps[0] == max(steps) > min(steps), "worker 0 is spared, and the others did less while away"


def test_a_run_longer_than_its_trace_is_refused(tmp_path: Path, trace: Path) -> None:
    said = simulate(tmp_path / "a", "--steps", 200, "--elastic", "--spot-trace", trace)
    assert said.code == 2
    assert "the run has outlasted its trace of 4 s" in said.err


def test_a_trace_of_preemptions_is_not_overwritten_by_a_timeline(tmp_path: Path, trace: Path) -> None:
    said = simulate(tmp_path / "a", "--steps", 4, "--trace", trace)
    assert said.code == 2
    assert "holds spot preemptions: give it as --spot-trace" in said.err
    assert json.loads(trace.read_text()) == TRACE
