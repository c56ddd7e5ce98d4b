"""Means, spreads and names over runs; what a page is told; names that would break out of it."""

from __future__ import annotations

import json
import statistics
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.core.ledger import Ledger
from offbeat.experiments.report.aggregate import Statistic, changed, grouped, remarks
from offbeat.experiments.report.aggregate import statistics as statistics_of
from offbeat.experiments.report.load import load_all
from offbeat.experiments.report.page import described, embedded, page
from offbeat.strategies import STRATEGIES
from tests.support.plugins import offer, searching
from tests.support.run_folders import EVIL, run_folder


def run(**changed: Any) -> dict[str, Any]:
    point = {"step": 4, "seconds": 1.0, "loss": 2.0, "value": 0.5, "bytes_sent": 100}
    worker = {"rank": 0, "compute_s": 3.0, "communicate_s": 1.0, "wait_s": 1.0, "staleness_max": 2}
    known = {
        "strategy": "bsp", "settings": {}, "task": "digits", "metric": "accuracy", "workers": 1, "seed": 0,
        "steps": 4, "sync_steps": 1, "seconds": 1.0, "seconds_to_target": 1.0, "bytes_to_target": 100,
        "value": 0.5, "best": 0.5, "bytes_sent": 100, "samples_per_second": 8.0, "target": 0.4,
        "per_worker": [{**worker, "staleness": {"0": 3, "2": 1}}], "history": [point],
    }  # fmt: skip
    return {**known, **changed}


# --- mean and spread


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=9))
@settings(deadline=None)
def test_a_figure_is_the_mean_and_the_sample_deviation(values: list[float]) -> None:
    figure = Statistic.of([None, *values])
    assert figure.mean == pytest.approx(sum(values) / len(values), abs=1e-6)
    assert figure.spread == pytest.approx(statistics.stdev(values))
    assert figure.runs == len(values)


def test_one_run_has_no_spread_and_none_no_mean() -> None:
    assert Statistic.of([3.0]) == Statistic(3.0, None, 1)
    assert Statistic.of([None]) == Statistic(None, None, 0)


def test_a_target_that_some_runs_miss_is_counted() -> None:
    (group,) = grouped([run(seed=0), run(seed=1, seconds_to_target=None), run(seed=2, seconds_to_target=3.0)])
    assert group.statistic("seconds_to_target") == Statistic(2.0, pytest.approx(2**0.5), 2)
    assert len(group.runs) == 3


def test_shares_of_time_and_of_steps() -> None:
    (group,) = grouped([run()])
    assert group.waiting.mean == pytest.approx(0.25)
    assert group.synced.mean == pytest.approx(0.25)
    assert group.staleness() == {0: 3, 2: 1}


def test_bytes_that_no_network_carried_are_remarked() -> None:
    served = run(strategy="ssp", workers=2, bytes_sent=0)
    told = remarks(grouped([run(workers=2), served]))
    assert [remark.partition(":")[0] for remark in told] == ["ssp"]
    assert remarks(grouped([run(workers=1, bytes_sent=0), run(workers=2)])) == []


def test_work_that_did_not_count_is_remarked() -> None:
    """Updates that a server refused, and changes that a guard left out, of all workers and seeds."""
    workers = [{"compute_s": 1.0, "wait_s": 0.0, "refused": 2, "outliers": 1} for _ in range(2)]
    one = [{"compute_s": 1.0, "wait_s": 0.0, "outliers": 1}]
    told = remarks(grouped([run(strategy="diloco", per_worker=workers, seed=seed) for seed in (0, 1)]))
    assert told == [
        "diloco: 8 updates were not used: too late for the server, or not finite",
        "diloco: 4 changes were left out of merges: outliers",
    ]
    assert remarks(grouped([run(per_worker=one)])) == ["bsp: 1 change was left out of a merge: an outlier"]


def test_what_a_replica_scores_is_remarked_where_the_mean_is_nobodys() -> None:
    runs = [
        run(strategy="selsync", seed=n, value=v, replica_value=r)
        for n, v, r in ((0, 0.5, 0.7), (1, 0.7, 0.8))
    ]
    assert remarks(grouped(runs)) == [
        "selsync: no worker trained the mean that is evaluated (accuracy 0.6); worker 0's own weights: 0.75"
    ]
    assert remarks(grouped([run(replica_value=None)])) == []


# --- which runs belong together, and what tells groups apart


def test_runs_that_differ_in_their_seed_only_are_one_group() -> None:
    runs = [run(seed=0), run(strategy="ssp", seed=0), run(seed=1), run(strategy="ssp", seed=1)]
    assert [(g.label, [r["seed"] for r in g.runs]) for g in grouped(runs)] == [
        ("bsp", [0, 1]),
        ("ssp", [0, 1]),
    ]


@pytest.mark.parametrize(
    ("other", "labels"),
    [
        ({"settings": {"period": 8, "weighted": False}}, ["local_sgd period=4", "local_sgd period=8"]),
        ({"workers": 8}, ["local_sgd workers=1", "local_sgd workers=8"]),
        ({"cluster": "wan"}, ["local_sgd", "local_sgd cluster=wan"]),
        ({"emulated": ["slow"]}, ["local_sgd", "local_sgd emulated=slow"]),
        ({"strategy": "bsp", "settings": {}}, ["local_sgd", "bsp"]),
    ],
)
def test_a_label_says_what_differs_and_no_more(other: dict[str, Any], labels: list[str]) -> None:
    mine = run(strategy="local_sgd", settings={"period": 4, "weighted": False})
    assert [group.label for group in grouped([mine, {**mine, **other}])] == labels


def test_only_settings_that_are_not_the_defaults_are_shown() -> None:
    plain = {"codec": None, "period": 8, "weighted": False}
    assert changed("local_sgd", plain) == []
    assert changed("local_sgd", {**plain, "weighted": True, "period": 4}) == ["period=4", "weighted=true"]
    assert changed("local_sgd", {"period": 8, "forgotten": None}) == ["forgotten=none"], "an older version's"
    assert changed("theirs", plain) == ["codec=none", "period=8", "weighted=false"]
    for name, cls in STRATEGIES.items():
        assert changed(name, cls().settings()) == []


def test_a_page_tells_what_is_changed_and_what_the_label_says_of_it() -> None:
    runs = [run(strategy="local_sgd", settings={"period": p, "weighted": True}) for p in (8, 4)]
    told = [(group["changed"], group["label_settings"]) for group in described(runs)["groups"]]
    assert told == [(["weighted=true"], ["period=8"]), (["period=4", "weighted=true"], ["period=4"])]


def test_a_curve_joins_the_evaluations_that_all_runs_share() -> None:
    points = [{"step": s, "seconds": s / 2, "loss": 1.0, "value": s / 10, "bytes_sent": s} for s in (1, 2, 3)]
    later = [{**point, "seconds": point["seconds"] + 1, "value": 0.0} for point in points[:2]]
    (group,) = grouped([run(seed=0, history=points), run(seed=1, history=later), run(seed=2, history=[])])
    first, second = group.curve()
    assert (first["step"], second["step"]) == (1, 2)
    assert (first["seconds"], second["seconds"]) == (1.0, 1.5)
    assert (second["value"], second["value_low"], second["value_high"]) == (0.1, 0.0, 0.2)


def test_bytes_are_those_of_workers_and_server_whichever_version_wrote_them() -> None:
    """The fault: what a server on machines of its own sent, half of all bytes, was on no page."""
    point = run()["history"][0]
    runs = [
        run(seed=0, bytes_total=300, history=[{**point, "bytes_total": 300}]),
        run(seed=1, bytes_server=150, history=[{**point, "bytes_server": 150}]),  # of an older version
        run(seed=2),  # of one that did not count the server's
    ]
    (group,) = grouped(runs)
    assert statistics_of(group)["bytes_total"]["mean"] == (300 + 250 + 100) / 3
    assert group.curve()[0]["bytes_total"] == (300 + 250 + 100) / 3


def test_a_mean_over_what_diverged_is_none() -> None:
    lost = [{"step": 4, "seconds": 1.0, "loss": None, "value": None}]
    (group,) = grouped([run(seed=0), run(seed=1, history=lost)])
    assert [group.curve()[0][name] for name in ("loss", "value", "bytes_total")] == [None, None, None]


# --- folders and pages


@given(st.text() | st.sampled_from([EVIL, "<!--", "]]>", "\u2028", "&lt;"]))
@settings(deadline=None)
def test_embedded_data_is_itself_and_no_markup(text: str) -> None:
    written = embedded({text: [text, float("nan")]})
    assert json.loads(written) == {text: [text, None]}
    assert not set("<>&\u2028") & set(written)


def test_a_page_holds_every_part_and_asks_for_nothing(tmp_path: Path) -> None:
    run_folder(tmp_path)
    written = page(load_all([tmp_path]))
    assert "{{" not in written.replace("`${", "")
    assert "http://" not in written.replace("http://www.w3.org/", "")
    assert "https://" not in written
    assert described(load_all([tmp_path]))["groups"][0]["label"] == "bsp"
    assert len(written) < 100_000


def test_spans_are_kept_to_the_end_where_only_the_end_is_wanted() -> None:
    now = [0.0]
    ledger = Ledger(0, lambda: now[0])
    ledger.spans = deque(maxlen=3)
    ledger.start()
    for _ in range(10):
        now[0] += 1
        ledger.step()
    assert [span.name for span in ledger.spans] == ["8", "9", "10"]


def test_runs_of_a_plugin_that_is_broken_now_are_still_shown(tmp_path: Path) -> None:
    offer(tmp_path, "torn-strategies", "offbeat.strategies", {"torn": "torn_strategies:Torn"})
    with searching(STRATEGIES, tmp_path):
        assert changed("torn", {"period": 8}) == ["period=8"]
