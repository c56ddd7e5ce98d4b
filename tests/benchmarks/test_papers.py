"""The claims of papers are well-formed, their runs are kept and not done twice, and the table is theirs."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.papers import figures, runs, table
from benchmarks.papers.claims import PARAMETERS, Claim, Outcome, Paper, Run, ring_s, server_s
from benchmarks.papers.command import PAPERS, parse_options, runs_in_order, shorten
from benchmarks.papers.runs import Cache, cluster_of, perform, perform_all, strategy_of
from benchmarks.papers.selsync import implied_ratio
from hypothesis import given
from hypothesis import strategies as st

from offbeat.core.blocks import trainable_bytes
from offbeat.experiments.tasks import task

CLAIMS = [(paper.name, claim) for paper in PAPERS.values() for claim in paper.claims]
IDS = [f"{name}: {claim.claim}" for name, claim in CLAIMS]
RUN = Run(task="digits", model="cnn", strategy="bsp", cluster="lan-1g", workers=2, steps=6, batch_size=8)


def numbers(text: str) -> set[float]:
    return {float(number) for number in re.findall(r"\d*\.?\d+", text)}


# --- claims


@pytest.mark.parametrize("claim", [claim for _, claim in CLAIMS], ids=IDS)
def test_a_figure_is_marked_and_stands_in_its_source(claim: Claim) -> None:
    assert claim.mark in ("paper", "code", "abstract")
    assert bool(claim.source) or not claim.figure
    assert numbers(claim.figure) <= numbers(claim.source)
    assert claim.settings
    assert not any("|" in text for text in (claim.claim, claim.figure, claim.settings, claim.why))


@pytest.mark.parametrize("claim", [claim for _, claim in CLAIMS], ids=IDS)
def test_a_claim_s_runs_can_be_made(claim: Claim) -> None:
    assert claim.runs
    for some in claim.runs.values():
        assert [run.seed for run in some] == list(range(len(some)))
        for run in some:
            strategy_of(run)
            task(run.task, model=run.model, batch_size=run.batch_size)
            assert cluster_of(run).size == run.workers


@pytest.mark.parametrize("name", PAPERS)
def test_contenders_of_a_claim_differ(name: str) -> None:
    for claim in PAPERS[name].claims:
        first = [some[0] for some in claim.runs.values()]
        assert len(set(first)) == len(first), claim.claim


def test_models_are_as_large_as_is_said() -> None:
    for name in ("mnist", "cifar10", "multi30k", "wikitext2"):
        for model in task(name).models:
            if model in PARAMETERS:
                assert trainable_bytes(task(name, model=model).build()) == 4 * PARAMETERS[model]
    assert ring_s("lenet5", 2, 8.0) == 4 * PARAMETERS["lenet5"]
    assert server_s("lenet5", 2, 8.0) == 8 * PARAMETERS["lenet5"]


@given(st.floats(0.1, 0.99), st.floats(0.1, 50))
def test_the_regime_is_where_speed_up_and_lssr_agree(lssr: float, ratio: float) -> None:
    speed_up = (1 + ratio) / (1 + (1 - lssr) * ratio)
    assert implied_ratio(lssr, speed_up) == pytest.approx(ratio, rel=1e-6)


def test_what_is_cheap_comes_first_and_further_seeds_last() -> None:
    order = runs_in_order(PAPERS.values())
    assert len(set(order)) == len(order)
    ranks = [(run.evaluations > 0, run.seed > 0) for run in order]
    assert ranks == sorted(ranks)
    assert set(order) == {run for _, claim in CLAIMS for some in claim.runs.values() for run in some}


def test_runs_can_be_made_shorter() -> None:
    for paper in PAPERS.values():
        for before, after in zip(
            runs_in_order([paper]), runs_in_order([shorten(paper, False, 0.5)]), strict=True
        ):
            assert after.steps == (round(before.steps / 2) if before.evaluations else before.steps)
        assert all(
            run.steps < 10 and not run.evaluations for run in runs_in_order([shorten(paper, True, 1.0)])
        )


# --- figures


def outcome(value: float = 0.5, seconds: float = 8.0, **other: Any) -> Outcome:
    history = [{"seconds": seconds * part, "value": value * part} for part in (0.25, 0.5, 1.0)]
    plain = {"metric": "accuracy", "value": value, "best": value, "seconds": seconds, "machine": "a CPU"}
    return {**plain, "higher_is_better": True, "history": history, "lssr": 0.8, **other}


def test_scores_are_compared_seed_by_seed() -> None:
    outcomes = {"bsp": [outcome(0.5), outcome(0.7)], "new": [outcome(0.51), outcome(0.69)]}
    told = figures.compare_scores(outcomes, "new")
    assert told == "60.00 (51.00 – 69.00) vs 60.00 (50.00 – 70.00) (bsp): +0.00 (-1.00 – +1.00); 2 seeds"
    assert figures.compare_scores({"a": [outcome(0.5)], "b": [outcome(0.6)]}, "a", "b") == (
        "50.00 vs 60.00 (b): -10.00; 1 seed"
    )


def test_how_much_sooner_both_were_as_good() -> None:
    outcomes = {"bsp": [outcome(0.8, 16.0)], "new": [outcome(0.4, 2.0)]}  # 0.4 at 8 s, and at 2 s
    assert figures.speedup_to_score(outcomes, "new") == "4.00x"
    assert figures.speedup_for_steps(outcomes, "new") == "8.00x"
    worse = [
        {**some[0], "higher_is_better": False} for some in outcomes.values()
    ]  # 0.8 at 16 s; 0.1 at 0.5 s
    for run in worse:
        run["best"] = min(point["value"] for point in run["history"])
    assert figures.speedup_to_score({"bsp": worse[:1], "new": worse[1:]}, "new") == "8.00x"


def test_perplexity_is_not_a_percentage() -> None:
    assert figures.score(outcome(0.5, metric="bleu")) == 0.5
    assert figures.score(outcome(0.5)) == 50


@pytest.mark.parametrize("seeds", [2, 3, 6, 20])
def test_an_interval_is_as_wide_as_student_s_t_says(seeds: int) -> None:
    values = [float(value) for value in range(seeds)]
    half = figures.half_interval(values)
    assert half is not None
    edge = half / (statistics.stdev(values) / math.sqrt(seeds))
    freedom, pieces = seeds - 1, 20_000
    width = edge / pieces
    density = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    inside = sum((1 + ((n + 0.5) * width) ** 2 / freedom) ** (-(freedom + 1) / 2) for n in range(pieces))
    assert 2 * density * inside * width == pytest.approx(0.95, abs=1e-4)
    assert figures.half_interval([1.0]) is None


# --- runs


def test_time_is_the_stated_one_for_all_groups_alike() -> None:
    run = replace(RUN, cluster="paper-gssp", workers=16)
    usual, slower = cluster_of(run), cluster_of(replace(run, step_s=0.3))
    for worker in range(16):
        before, after = (cluster.step_seconds(worker, 5, 1.0, 0) for cluster in (usual, slower))
        assert after == pytest.approx(3 * before)


def test_a_run_is_timed_by_its_last_steps() -> None:
    never = replace(RUN, strategy="selsync", settings=("delta=inf", "window=2"), step_s=0.2)
    told = perform(never, None)
    assert told["late_step_s"] == pytest.approx(0.2)  # the first two steps average, and are not in it
    assert told["seconds"] > 6 * 0.2
    assert told["rate"] == pytest.approx(2 * 6 / told["seconds"])
    assert told["steps"] == 6
    assert told["value"] != told["value"]  # nothing was evaluated
    looked = perform(replace(RUN, evaluations=2), None)
    assert [point["step"] for point in looked["history"]] == [3, 6]
    assert 0 < looked["value"] < 1


def test_a_cache_is_read_back_and_survives_a_cut_line(tmp_path: Path) -> None:
    cache = Cache(tmp_path, "one")
    other = replace(RUN, settings=("a=1", "b=2"), seed=1)
    cache.add(RUN, outcome())
    with (tmp_path / "one.jsonl").open("a") as file:
        file.write('{"run": {"task": "dig')
    again = Cache(tmp_path, "one")
    assert RUN in again
    assert other not in again
    again.add(other, outcome(0.9))
    third = Cache(tmp_path, "another machine's")
    assert third[RUN] == outcome()
    assert third[other] == outcome(0.9)


def here(monkeypatch: pytest.MonkeyPatch, perform: Callable[..., Outcome]) -> None:
    """Runs are performed by this, in threads."""
    monkeypatch.setattr(runs, "ProcessPoolExecutor", lambda jobs, *_: ThreadPoolExecutor(jobs))
    monkeypatch.setattr(runs, "perform", perform)


def test_only_what_is_missing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Run] = []

    def note(run: Run, *_: object) -> Outcome:
        done.append(run)
        return outcome(took_s=1.0)

    here(monkeypatch, note)
    first, second, third = RUN.seeds(3)
    cache = Cache(tmp_path)
    cache.add(second, outcome())
    assert perform_all([first, second, first, third], cache, None, say=lambda _: None) == []
    assert done == [first, third]
    assert perform_all([first, second, third], Cache(tmp_path), None, say=lambda _: None) == []
    assert done == [first, third]


def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = RUN.seeds(3)

    def fail(run: Run, *_: object) -> Outcome:
        if run == second:
            raise RuntimeError("out of memory")
        return outcome(took_s=1.0)

    here(monkeypatch, fail)
    told: list[str] = []
    cache = Cache(tmp_path)
    assert perform_all([first, second, third], cache, None, jobs=2, say=told.append) == [second]
    assert third in cache
    assert sum("out of memory" in line for line in told) == 1


def test_nothing_is_begun_when_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, lambda run, *_: pytest.fail("begun"))
    assert perform_all(RUN.seeds(2), Cache(tmp_path), None, minutes=0.0) == list(RUN.seeds(2))


# --- the table


def test_the_table_has_what_the_cache_has(tmp_path: Path) -> None:
    claim = Claim(
        claim="better",
        mark="paper",
        figure="2.03×",
        source="2.03×",
        runs={"bsp": RUN.seeds(2), "new": replace(RUN, strategy="local_sgd").seeds(2)},
        ours=lambda outcomes: figures.compare_scores(outcomes, "new"),
        settings="few",
        why="ours is smaller",
    )
    paper = Paper(name="p", title="P", claims=[claim])
    cache = Cache(tmp_path)
    assert table.build_table([paper], cache).rows == [
        ("P", "better", "2.03× [paper]", "not run", "few", "`--only p`", "ours is smaller")
    ]
    cache.add(claim.runs["bsp"][0], outcome(0.5))
    cache.add(claim.runs["bsp"][1], outcome(0.6))
    assert table.build_table([paper], cache).rows[0][3] == "not run"
    cache.add(claim.runs["new"][1], outcome(0.7))  # one seed that both have done
    written = table.build_table([paper], Cache(tmp_path))
    assert written.rows[0][3] == "70.00 vs 60.00 (bsp): +10.00; 1 seed"
    assert written.notes == ["3 runs on: a CPU"]


def test_options_name_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_options(["--table"]).only == list(PAPERS)
    assert parse_options(["--list", "--only", "gssp,osp", "--models", "lenet5"]).only == ["gssp", "osp"]
    with pytest.raises(SystemExit):
        parse_options(["--only", "gsp"])
    assert "choose from osp" in capsys.readouterr().err


def test_nothing_starts_without_data(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OFFBEAT_DATA", raising=False)
    with pytest.raises(SystemExit):
        parse_options([])
    assert "give --data FOLDER" in capsys.readouterr().err
    assert parse_options(["--data", "here"]).data == Path("here")


def test_runs_are_named_by_all_they_depend_on() -> None:
    assert json.loads(RUN.key)["cluster"] == "lan-1g"
    assert RUN.key != replace(RUN, seed=1).key != replace(RUN, evaluations=1).key
