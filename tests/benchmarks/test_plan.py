"""The benchmark of plans: which candidates are measured, and what counts as their seconds."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from benchmarks.support import tables
from benchmarks.support.hosts import HostFailed
from benchmarks.support.parts import Part
from benchmarks.support.raw import RawResults
from benchmarks.support.tables import Table
from benchmarks.virtual_time import plan
from benchmarks.virtual_time.plan import (
    Bench,
    RankingFailed,
    first_of_each,
    run_cases,
)
from benchmarks.virtual_time.plan_cases import CASES, TASKS, Case, describe, select
from benchmarks.virtual_time.plan_seconds import progress, seconds_at, start_seconds
from benchmarks.virtual_time.plan_table import (
    BY_NONE,
    COLUMNS,
    MISSED,
    Outcome,
    accuracy,
    add_rows,
    scope,
    verdict,
    write_table,
)

from offbeat.core.blocks import trainable_bytes
from offbeat.experiments.planner.plan_file import Plan, Ranked, save_plan
from offbeat.experiments.tasks import task
from offbeat.worlds.virtual.cluster import Cluster, Workers, dump


def test_seconds_at_a_step_are_on_the_line_between_evaluations() -> None:
    history = [{"step": 10, "seconds": 1.0}, {"step": 20, "seconds": 4.0}]
    assert seconds_at(5, history) == pytest.approx(0.5), "from the start"
    assert seconds_at(10, history) == pytest.approx(1.0)
    assert seconds_at(15, history) == pytest.approx(2.5)
    assert seconds_at(30, history) == pytest.approx(6.0), "after the end, at its rate"


def test_progress_counts_what_all_workers_have_done() -> None:
    """Rank 0 did 4 of 12 batches, evenly: at the end of its second one, three workers had done 2 each."""
    points = progress([1.0, 2.0, 3.5, 4.0], [4, 6, 2])
    assert points == [{"step": number, "seconds": s} for number, s in enumerate([1.0, 2.0, 3.5, 4.0], 1)]
    slow = progress([1.0, 2.0], [2, 7])
    assert [point["step"] for point in slow] == [2.25, 4.5], "the others do more, and rank 0's steps are long"
    assert seconds_at(3, progress([0.5, 1.0, 1.5], [3, 3])) == 1.5, "equal work: as its own steps"


def test_the_first_of_different_strategies_are_measured_and_bsp() -> None:
    def ranked(strategy: str, seconds: float | None, **settings: Any) -> Ranked:
        return Ranked(strategy=strategy, strategy_settings=settings, seconds_to_target=seconds)

    first, same, other, late = (
        ranked("local_sgd", 1.0, period=4),
        ranked("local_sgd", 1.1, period=8),
        ranked("ssp", 1.2),
        ranked("osp", 1.3),
    )
    bsp, never = ranked("bsp", 1.4), ranked("gssp", None)
    assert first_of_each((first, same, other, late, bsp, never), 2) == [(1, first), (3, other), (5, bsp)]
    assert first_of_each((bsp, first), 2) == [(1, bsp), (2, first)]


def test_there_are_three_tasks_three_rates_and_a_straggler() -> None:
    assert len(CASES) == len({case.name for case in CASES}) == 18


CASE = CASES[0]
CANDIDATE = {"rank": 1, "candidate": "ssp", "steps": 30.2, "predicted_s": 3.0, "fate": ""}
CANDIDATE |= {"value": 0.7512, "target": 0.75}


def test_the_first_choice_is_compared_with_the_fastest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    table = Table("plan", "?", COLUMNS)
    found = {
        "link": "a link",
        "candidates": [
            {**CANDIDATE, "measured_s": 3.3},
            {**CANDIDATE, "rank": 4, "candidate": "bsp", "measured_s": 3.0, "value": 0.8},
            {**CANDIDATE, "rank": 9, "candidate": "osp", "measured_s": 1.0, "steps": None},
        ],
    }
    assert add_rows(table, CASE, found) == Outcome(pytest.approx(1.1))
    value = "0.751, target 0.75"
    assert table.rows[0] == (CASE.name, "1", "ssp", "30", "3.00", "3.30", "0.909", "2", "1.10", value)
    assert table.rows[2][3:] == ("–", "3.00", "–", "–", "**missed**", "–", value), "not in virtual time"
    assert add_rows(table, CASE, {"error": "host 2\nfailed"}) == Outcome(math.inf, "failed")
    assert table.notes[-1] == f"{CASE.name} failed: host 2 failed"


def test_a_run_that_ends_below_the_target_is_compared_with_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rule for the first choice and for the others, whether they have a server or not."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    table = Table("plan", "?", COLUMNS)

    def outcome(*runs: tuple[float, float]) -> Outcome:
        rows = [{**CANDIDATE, "measured_s": seconds, "value": value} for seconds, value in runs]
        return add_rows(table, CASE, {"candidates": rows})

    assert outcome((1.0, 0.749), (1.2, 0.75)) == Outcome(math.inf, MISSED)
    assert table.rows[0][-3:-1] == ("**missed**", "–")
    assert table.rows[1][-3:-1] == ("1", "1.00")
    assert outcome((1.0, 0.749), (1.2, 0.7)) == Outcome(math.inf, BY_NONE)
    assert "not reached by any" in table.notes[-1]
    assert outcome((1.2, 0.75), (1.0, 0.749)) == Outcome(1.0), "the faster one missed it"


def test_first_steps_are_left_out_where_a_run_says_how_long_they_took() -> None:
    assert start_seconds([0.3, 0.4, 0.5, 0.6, 0.7]) == pytest.approx(0.2)
    assert start_seconds([0.3, 0.4, 0.5, 0.9, 1.0]) == pytest.approx(0.2), "whatever one exchange takes"
    assert start_seconds([0.1, 0.2, 0.5, 0.8]) == 0.0
    assert start_seconds([0.3, 0.4]) == 0.0, "no later step to compare with"
    rows = [{**CANDIDATE, "measured_s": 3.2, "start_s": 0.2}, {**CANDIDATE, "measured_s": 3.2}]
    table = Table("plan", "?", COLUMNS)
    add_rows(table, CASE, {"candidates": rows})
    assert [row[5:7] for row in table.rows] == [("3.00", "1.000"), ("3.20", "0.938")]


def test_the_verdict_needs_all_cases() -> None:
    near, far = Outcome(1.09), Outcome(1.11)
    beginning = "the first choice is within 10% of the fastest measured in"
    assert verdict([near, near], 2) == f"{beginning} 2 of 2 cases. The goal (all) is met."
    assert verdict([near, far], 2).endswith("is missed.")
    assert verdict([near], 2).endswith("not in this table: 1 of 2. The goal (all) is met so far.")
    for reason, told in (
        (MISSED, "it missed the target: 2"),
        (BY_NONE, "the target was not reached by any: 2"),
        ("failed", "failed: 2"),
    ):
        without = Outcome(math.inf, reason)
        words = f"{beginning} 1 of 3 cases; {told}. The goal (all) is missed."
        assert verdict([near, without, without], 3) == words


def test_the_verdict_says_how_far_predictions_are_off_and_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def case(*measured: float, **more: Any) -> dict[str, Any]:
        return {"candidates": [{**CANDIDATE, "measured_s": seconds, **more} for seconds in measured]}

    found = [case(3.1, 3.25), case(3.7, 2.5, 3.0, steps=18.0, target=0.7)]
    assert accuracy(found) == (
        "Predicted seconds are off by more than 7% in 3 of 5 rows, by more than 15% in 2; of the 2 first "
        "choices in 1 and 1 (predicted / measured 0.811 to 0.968)."
    )
    assert scope(found) == (
        "Rankings with `--most-seeds 1`; targets of 0.70 to 0.75, reached in virtual time after 18 to 30 "
        "steps; 2 to 3 candidates measured per case, BSP too."
    )
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    kept = [{"machine": "here", "code": "a", **each} for each in (*found, {"error": "host 2 failed"})]
    write_table("?", dict(zip(CASES, kept, strict=False)))
    (file,) = tmp_path.rglob("*.md")
    text = file.read_text()
    assert accuracy(found) in text and scope(found) in text and "5 rows do not say" in text


def test_three_parts_of_the_cases_take_about_as_long() -> None:
    def cost(case: Case) -> float:
        return case.ranking_s + case.measuring_s(3)

    loads = [sum(map(cost, Part(k, 3).of(CASES, cost))) for k in (1, 2, 3)]
    assert max(loads) < 1.1 * min(loads)


def test_cases_are_selected_by_what_they_are() -> None:
    some = select(["digits"], ["50mbit", "1gbit"], ["equal"])
    assert [case.name for case in some] == ["digits, 1gbit, equal", "digits, 50mbit, equal"]
    lines = describe(some, 3, 2)
    assert len(lines) == 3 and lines[-1].endswith("min")


def test_bytes_and_models_are_those_of_the_tasks() -> None:
    for subject in TASKS:
        model = task(subject.name, model=subject.model).build()
        assert trainable_bytes(model) == subject.nbytes
    shared = {case.hosts for case in CASES}
    assert len(shared) == 12, "two tasks have the same model"


# --- the stages, with hosts that only write what `offbeat` would


class FakeHosts:
    """Hosts on which `offbeat train` takes 0.1 s a step, the first 0.15 s; a command can be made to fail."""

    def __init__(self, fails: str = "") -> None:
        self.rate, self.fails = "1gbit", fails
        self.ran: list[str] = []
        self.steps: list[int] = []

    def set_rate(self, rate: str) -> None:
        self.rate = rate

    def describe_link(self) -> str:
        return f"a link of {self.rate}"

    def run(self, command: list[str], timeout: float, echo: bool) -> None:
        named = dict(pairwise(command))
        self.ran.append(f"{self.rate} {command[3]} {named.get('--strategy', '')}".strip())
        if self.fails and self.fails in self.ran[-1]:
            raise HostFailed("host 2 failed", 1)
        out = Path(named["--out"])
        if command[3] == "calibrate":
            workers = Workers(step_s=0.04, up_bits_per_s=1e9, down_bits_per_s=1e9, count=4)
            out.write_text(dump(Cluster(workers=(workers,))))
            return
        out.mkdir(exist_ok=True)
        self.steps.append(int(named["--steps"]))
        assert named["--evaluate-every"] == named["--steps"], "at the end only"
        rows = [
            {"event": "step", "step": step, "seconds": 0.1 * step + 0.05}
            for step in range(1, 1 + self.steps[-1])
        ]
        Path(named["--log"]).write_text("\n".join(map(json.dumps, [{"event": "start"}, *rows])))
        summary = {"history": [{"value": 0.76}], "per_worker": 4 * [{"steps": self.steps[-1]}]}
        (out / "summary.json").write_text(json.dumps(summary))


class FakeBench(Bench):
    """Benchmark in which `offbeat plan` writes a ranking made by hand; it reaches no target above 0.9."""

    def _run_idle(self, command: Sequence[str]) -> None:
        named = dict(pairwise(command))
        if float(named["--target"]) > 0.9:
            raise RankingFailed("no candidate reached the target")
        first = Ranked(strategy="local_sgd", strategy_settings={"period": 4}, seconds_to_target=0.8)
        bsp = Ranked(strategy="bsp", strategy_settings={}, seconds_to_target=1.2, steps_to_target=13.5)
        other = replace(first, strategy="ssp", strategy_settings={}, steps_to_target=17.0)
        ranking = (replace(first, steps_to_target=15.0), bsp, other)
        job: dict[str, Any] = {"task": "digits", "model": "cnn", "batch_size": 16, "workers": 4, "steps": 24}
        chosen: dict[str, Any] = {"strategy": "local_sgd", "strategy_settings": {"period": 4}, "target": 0.5}
        plan = Plan(**job, **chosen, ranking=ranking)
        save_plan(Path(named["--out"]), plan, "# made by hand\n")


def bench_of(folder: Path, hosts: FakeHosts | None, **more: Any) -> FakeBench:
    raw, scratch = RawResults("plan", folder / "raw"), folder / "scratch"
    scratch.mkdir(exist_ok=True)
    given: dict[str, Any] = {"strategies": "local_sgd", "seed": 101, "most": 1, **more}
    return FakeBench(hosts, Path("data"), scratch, raw, steps=24, evaluate_every=2, **given)  # type: ignore[arg-type]


CASES_HERE = select(["digits"], ["1gbit", "50mbit"], ["equal"])


@pytest.mark.parametrize("beside", [False, True])
def test_cases_are_calibrated_ranked_and_measured_and_not_again(
    tmp_path: Path, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = FakeHosts()
    run_cases(bench_of(tmp_path, hosts), CASES_HERE, "measured", beside)
    trained = [f"{rate} train {name}" for rate in ("1gbit", "50mbit") for name in ("local_sgd", "bsp")]
    assert hosts.ran == ["1gbit calibrate", "50mbit calibrate", *trained]
    assert hosts.steps == [17, 16] * 2, "the planned steps, and two more"
    found = RawResults("plan", tmp_path / "raw").get(CASES_HERE[0].name)
    assert [(row["rank"], row["measured_s"], row["start_s"]) for row in found["candidates"]] == [
        (1, pytest.approx(1.55), pytest.approx(0.05)),
        (2, pytest.approx(1.4), pytest.approx(0.05)),
    ]
    assert found["link"] == "a link of 1gbit"
    again = FakeHosts()
    run_cases(bench_of(tmp_path, again), CASES_HERE, "measured", beside)
    assert again.ran == [], "all is kept"
    run_cases(bench_of(tmp_path, again, most=3), CASES_HERE, "measured", beside)
    assert {line.split()[1] for line in again.ran} == {"train"}, "other runs of the same ranking"
    run_cases(bench_of(tmp_path, None), CASES_HERE, "ranked", beside)  # needs no hosts
    monkeypatch.setattr(plan, "code_print", lambda: "other code")
    other = FakeHosts()
    run_cases(bench_of(tmp_path, other, any_code=True), CASES_HERE, "measured", beside)
    assert {line.split()[1] for line in other.ran} == {"train"}, "calibrated and ranked by other code"
    monkeypatch.undo()
    with pytest.raises(SystemExit, match="first run with --until calibrated"):
        run_cases(bench_of(tmp_path, None, strategies="bsp"), CASES_HERE, "ranked", beside)


def test_a_failure_is_kept_as_a_miss_and_tried_again(tmp_path: Path) -> None:
    case = CASES_HERE[0]
    raw = RawResults("plan", tmp_path / "raw")
    for fails, ran in (("calibrate", 1), ("bsp", 3)):
        hosts = FakeHosts(fails)
        run_cases(bench_of(tmp_path, hosts), [case], "measured", beside=False)
        assert raw.get(case.name)["error"] == "host 2 failed"
        assert len(hosts.ran) == ran
    hosts = FakeHosts()
    run_cases(bench_of(tmp_path, hosts), [case], "measured", beside=False)
    assert len(raw.get(case.name)["candidates"]) == 2
    assert [line.split()[1] for line in hosts.ran] == ["train", "train"], "the calibration is kept"


def test_a_ranking_that_fails_is_a_miss(tmp_path: Path) -> None:
    case = replace(CASES_HERE[0], subject=replace(TASKS[0], target=0.999))
    run_cases(bench_of(tmp_path, FakeHosts()), [case], "measured", beside=False)
    assert "no candidate reached the target" in RawResults("plan", tmp_path / "raw").get(case.name)["error"]


def test_a_case_is_kept_for_the_same_options_of_the_same_code() -> None:
    now = {"code": "a", "machine": "b", "run": {"most": 2, "steps": 48}}
    found = {**now, "candidates": []}
    assert plan.is_kept(found, now)
    assert not plan.is_kept({**found, "error": "host 1 failed"}, now)
    assert not plan.is_kept(found, {**now, "run": {"most": 2, "steps": 4}})
    assert not plan.is_kept(found, {**now, "code": "other"})
