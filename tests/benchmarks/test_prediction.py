"""The benchmark prediction: its cases are declared, a finished one is kept, and the table has all misses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.support import raw as raw_results
from benchmarks.support import tables
from benchmarks.support.parts import Part
from benchmarks.support.raw import RawResults
from benchmarks.virtual_time import prediction
from benchmarks.virtual_time.prediction_cases import GROUPS, METHODS, STRAGGLERS, Group, Method, select
from benchmarks.virtual_time.prediction_table import miss, verdict, write_table

from offbeat.strategies import STRATEGIES

GROUP = Group(GROUPS[0].model, "1gbit", "equal", (Method("bsp"), Method("ssp"), Method("asp")))


class Fake(prediction.Measurement):
    """A measurement without hosts: it counts what is asked of it, and fails where it is told to."""

    def __init__(self, steps: int | None = None, repeats: int = 1) -> None:
        super().__init__(self, Path(), Path(), steps, repeats, None)  # type: ignore[arg-type]
        object.__setattr__(self, "log", [])
        object.__setattr__(self, "fails", {})

    log: list[str]
    fails: dict[str, BaseException | str]

    def set_rate(self, rate: str) -> None:
        self.log.append(rate)

    def calibrate(self, group: Group) -> dict[str, Any]:
        self.log.append("calibrate")
        return {"link": "a link", "cluster": "a cluster"}

    def run(self, group: Group, method: Method, cluster: str) -> dict[str, Any]:
        assert cluster == "a cluster"
        how = self.fails.get(str(method))
        if isinstance(how, BaseException):
            raise how
        self.log.append(str(method))
        if how:
            return {"steps": self.steps_of(group), "error": how}
        return {"steps": self.steps_of(group), "measured_s": self.repeats * [0.1], "predicted_s": 0.105}

    def predict(self, group: Group, method: Method, cluster: str, number: int) -> float:
        assert cluster == "a cluster"
        self.log.append(f"predict {method}")
        return 0.09


@pytest.fixture
def raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RawResults:
    monkeypatch.setattr(raw_results, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["__main__.py", "run", "prediction"])
    return RawResults("prediction")


def test_every_strategy_rate_and_kind_of_workers_is_declared() -> None:
    assert {method.name for method in METHODS} == set(STRATEGIES.own) - {"auto"}
    assert len({str(method) for method in METHODS}) == len(METHODS)
    mlp = [group for group in GROUPS if group.model.name == "mlp"]
    assert {(group.rate, group.workers) for group in mlp} == {
        (rate, workers) for rate in ("1gbit", "200mbit", "50mbit") for workers in STRAGGLERS
    }
    assert len({group.name for group in GROUPS}) == len(GROUPS)


def test_codecs_are_named_as_a_cluster_file_names_them() -> None:
    codecs = GROUPS[0].codecs
    assert {"error_feedback(topk(0.01))", "quantize(8)", "error_feedback(powersgd(4))"} <= set(codecs)
    assert "error_feedback(topk(0.02, chunk=4096, bits=2), decay=0.95)" in codecs, "SparseLoCo's own"
    assert Method("bsp").codecs == []
    assert "topk(0.05)" in Method("gssp", ("sparse=gdtopk",)).codecs


def test_three_parts_take_at_most_twenty_minutes_by_their_estimates() -> None:
    for number in (1, 2, 3):
        own = Part(number, 3).of(GROUPS, lambda group: group.seconds)
        assert 600 < sum(group.seconds for group in own) < 1200


def test_a_part_of_the_cases_can_be_selected() -> None:
    (group,) = select(["50mbit"], ["lenet5"], ["equal"], ["asp", "osp"])
    assert [str(method) for method in group.methods] == ["osp", "asp"]
    assert not select(["1gbit"], ["lenet5"], ["equal"], ["asp"]), "not declared"


@pytest.mark.parametrize("shared", [1, 4], ids=["equal work", "shared work"])
def test_a_step_is_a_batch_of_each_worker_on_average_after_the_warm_up(tmp_path: Path, shared: int) -> None:
    """Where work is shared, worker 0 may log the common steps 1, 5 and 9."""
    run = tmp_path / "real"
    run.mkdir()
    summary = {"seconds": 9.0, "workers": 2, "steps": 33, "per_worker": [{"steps": 33}, {"steps": 11}]}
    (run / "summary.json").write_text(json.dumps(summary))
    steps = [{"event": "step", "step": 1 + shared * k, "seconds": 0.5 + 0.5 * k} for k in range(3)]
    lines = [json.dumps(row) for row in ({"event": "start", "steps": 22}, *steps)]
    (tmp_path / "real.jsonl").write_text("\n".join(lines))
    assert prediction.seconds_per_step(run) == pytest.approx((9.0 - 1.0) / 20)


def test_a_command_that_was_stopped_goes_on_with_the_same_calibration(raw: RawResults) -> None:
    first = Fake()
    first.fails["asp"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        prediction.run_group(GROUP, raw, GROUP.name, first, again=False)
    assert first.log == ["1gbit", "calibrate", "bsp", "ssp"]
    second = Fake()
    prediction.run_group(GROUP, raw, GROUP.name, second, again=False)
    assert second.log == ["1gbit", "asp"]
    third = Fake()
    prediction.run_group(GROUP, raw, GROUP.name, third, again=False)
    assert third.log == []
    prediction.run_group(GROUP, raw, GROUP.name, third, again=True)
    assert third.log == ["1gbit", "calibrate", "bsp", "ssp", "asp"]


def test_cases_that_failed_or_were_other_are_run_again(
    raw: RawResults, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Fake()
    first.fails["ssp"] = "host 1 failed"
    prediction.run_group(GROUP, raw, GROUP.name, first, again=False)
    assert raw.get(GROUP.name)["cases"]["ssp"]["error"] == "host 1 failed"
    for other, wanted in ((Fake(), ["ssp"]), (Fake(steps=5), 3), (Fake(steps=5, repeats=2), 3)):
        prediction.run_group(GROUP, raw, GROUP.name, other, again=False)
        assert other.log[0] == "1gbit"
        assert other.log[1:] == wanted if isinstance(wanted, list) else len(other.log) == 1 + wanted
    monkeypatch.setattr(prediction, "code_print", lambda: "other code")
    newer = Fake(steps=5, repeats=2)
    prediction.run_group(GROUP, raw, GROUP.name, newer, again=False)
    assert newer.log == ["1gbit", "calibrate", "bsp", "ssp", "asp"]


def test_chosen_cases_are_run_again_beside_the_others(
    raw: RawResults, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Fake()
    prediction.run_group(GROUP, raw, GROUP.name, first, again=False)
    before = raw.get(GROUP.name)
    monkeypatch.setattr(prediction, "code_print", lambda: "other code")
    later, chosen = Fake(), Group(GROUP.model, GROUP.rate, GROUP.workers, (Method("ssp"),))
    prediction.run_group(chosen, raw, GROUP.name, later, again=True)
    assert later.log == ["1gbit", "calibrate", "ssp"]
    found = raw.get(GROUP.name)
    marked = {name: case.get("code") for name, case in found["cases"].items()}
    assert marked == {"bsp": before["code"], "asp": before["code"], "ssp": None}
    assert found["code"] == "other code"
    written = write_table("?", [GROUP], {GROUP: found}, "")
    assert written is not None
    text = written.read_text()
    assert "calibrations of its own, while the others were kept: 1 of ssp" in text
    assert "run by 2 states of the code" in text
    third = Fake()
    prediction.run_group(chosen, raw, GROUP.name, third, again=True)
    assert {c.get("code") for c in raw.get(GROUP.name)["cases"].values()} == {before["code"], None}
    monkeypatch.setattr(prediction, "machine", lambda: "another machine")
    prediction.run_group(chosen, raw, GROUP.name, third, again=True)
    assert set(raw.get(GROUP.name)["cases"]) == {"ssp"}, "of another machine none is kept"


def test_kept_cases_are_predicted_again_without_running_them(
    raw: RawResults, monkeypatch: pytest.MonkeyPatch
) -> None:
    prediction.run_group(GROUP, raw, GROUP.name, Fake(), again=False)
    monkeypatch.setattr(prediction, "code_print", lambda: "other code")
    again = Fake()
    prediction.predict_again(GROUP, raw, GROUP.name, again)
    assert again.log[:2] == ["1gbit", "calibrate"]
    assert set(again.log[2:]) == {"predict bsp", "predict ssp", "predict asp"}
    found = raw.get(GROUP.name)
    assert found["cases"]["bsp"] | {"predicted_s": 0.09, "measured_s": [0.1]} == found["cases"]["bsp"]
    other_steps, fewer = Fake(steps=5), Group(GROUP.model, GROUP.rate, GROUP.workers, GROUP.methods[:2])
    prediction.predict_again(GROUP, raw, GROUP.name, other_steps)
    prediction.predict_again(fewer, raw, GROUP.name, other_steps)
    assert other_steps.log == [], "these real runs are of other cases"
    written = write_table("?", [GROUP], {GROUP: found}, "")
    assert written is not None and "predicted again after the real runs" in written.read_text()
    monkeypatch.setattr(prediction, "machine", lambda: "another machine")
    elsewhere = Fake()
    prediction.predict_again(GROUP, raw, GROUP.name, elsewhere)
    assert elsewhere.log == []


def test_a_calibration_without_a_codec_is_not_used_for_it(raw: RawResults) -> None:
    prediction.run_group(GROUP, raw, GROUP.name, Fake(), again=False)
    with_codec = Group(GROUP.model, GROUP.rate, GROUP.workers, (Method("bsp", ("codec=half",)),))
    later = Fake()
    prediction.run_group(with_codec, raw, GROUP.name, later, again=False)
    assert later.log == ["1gbit", "calibrate", "bsp codec=half"]
    assert len(raw.get(GROUP.name)["cases"]) == 4


def test_misses_are_beyond_seven_and_fifteen_percent() -> None:
    assert [miss(ratio) for ratio in (0.94, 1.06, 0.92, 1.14, 0.84, 1.16)] == [
        *("–", "–", "beyond 7%", "beyond 7%", "**beyond 15%**", "**beyond 15%**")
    ]


def test_the_verdict_counts_misses_failures_and_what_was_not_run() -> None:
    assert verdict([1.0] * 9 + [1.1], 10) == (
        "within 7%: 9 of 10 cases; beyond 15%: 0. The goal (nine of ten within 7%, none beyond 15%) is met."
    )
    assert verdict([1.0] * 9 + [1.2], 10).endswith("is missed.")
    assert verdict([1.0] * 8 + [1.1] * 2, 10).endswith("is missed.")
    failed = verdict([1.0] * 9 + [None], 12)
    assert "within 7%: 9 of 10 cases; beyond 15%: 0; failed: 1; not in this table: 2 of 12" in failed
    assert failed.endswith("is missed.")
    assert verdict([1.0], 2).endswith("is met so far.")


def test_the_table_begins_with_the_verdict_and_names_the_machine_of_the_runs(
    raw: RawResults, tmp_path: Path
) -> None:
    assert write_table("A question?", [GROUP], {GROUP: None}, "") is None
    found = {
        "machine": "a large machine",
        "code": "x",
        "parts": 3,
        "link": "a link",
        "cases": {
            "bsp": {"steps": 4, "measured_s": [0.1, 0.2, 0.3], "predicted_s": 0.21, "idle": [0.4]},
            "ssp": {"steps": 4, "error": "host 1\nfailed"},
        },
    }
    path = write_table("A question?", [GROUP], {GROUP: found}, "pieces-auto")
    assert path is not None and path.name.endswith("-pieces-auto.md")
    lines = path.read_text().splitlines()
    assert lines[2].startswith(
        "**Verdict**: within 7%: 1 of 2 cases; beyond 15%: 0; failed: 1; not in this table: 142 of 144"
    )
    path.unlink()
    assert write_table("A question?", [GROUP], {GROUP: found}, "", trial=True) is None
    assert not list(tmp_path.rglob("*.md")), "a trial is no result"
    assert any("on one machine: a large machine." in line for line in lines)
    assert "- mlp, 1gbit, equal: ssp failed: host 1 failed" in lines
    assert "- run in 3 parts, which could run at the same time, each on hosts of its own" in lines
    assert "- within 7%: ssp 0 of 1, bsp 1 of 1" in lines
    assert (
        "| 1gbit | mlp, paced 80 ms | equal | bsp | 200.0 | 100.0 to 300.0 | 210.0 | 1.050 | 40% | – |"
        in lines
    )
