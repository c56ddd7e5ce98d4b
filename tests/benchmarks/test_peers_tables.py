"""The comparison with peers: from outcomes to tables, the picture and the goals."""

from __future__ import annotations

import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from benchmarks.peers.cases import (
    CUT,
    FAILED,
    SEARCH,
    STRAGGLER,
    Cache,
    Outcome,
)
from benchmarks.peers.chart import WORDS, read_table, render_chart
from benchmarks.peers.results import Row, cells, goals, tables
from benchmarks.peers.tasks import TASKS

from tests.support.peers import case, outcome

ROOT = Path(__file__).parents[2]


def filled(folder: Path, *outcomes: Outcome) -> Cache:
    cache = Cache(folder)
    for told in outcomes:
        cache.add(told)
    return cache


def row_of(*outcomes: Outcome) -> list[str]:
    return cells(Row(outcomes))


def test_seeds_share_a_row(tmp_path: Path) -> None:
    """Of which every goal is judged by the means; who failed with one of them was not there."""
    at = [outcome("diloco", (5.0, 0.80), (5.0 + 2 * seed, 0.87), seed=seed) for seed in range(3)]
    peer = [outcome("torchft_diloco", (9.0 + 3 * seed, 0.88), seed=seed) for seed in range(2)]
    late = [outcome("osp", (1.0, 0.89)), outcome("osp", (30.0, 0.86), seed=1)]
    cache = filled(tmp_path, outcome("ddp", (40.0, 0.872)), *peer, *at, *late)
    main = tables(cache, "A question?")[0]
    assert [row[3] for row in main.rows] == ["ddp", "torchft_diloco", "diloco", "osp"]
    assert [row[5] for row in main.rows[1:]] == [
        "10.5 (9.0, 12.0)",
        "7.0 (5.0, 7.0, 9.0)",
        "not in 1 (1.0, not)",
    ]
    (goal,) = goals(cache)
    assert (goal.speedup, goal.met) == (1.5, True)
    assert "diloco 7.0 s (mean of 3 seeds), torchft_diloco 10.5 s (mean of 2 seeds)" in str(goal)


def test_a_row_says_how_it_ended() -> None:
    there = row_of(outcome("local_sgd", (4.0, 0.5), (8.0, 0.88), (12.0, 0.86), settings={"period": 16}))
    assert there[3:] == ["local_sgd", "period 16", "8.0", "0.8600", "2", "300", "40.0", "3", "done"]
    cut = row_of(outcome("ddp", (40.0, 0.8), ended=CUT))
    assert cut[5:8] == ["not in 40", "0.8000", "–"]
    assert cut[-1] == "cut short at 40 s"
    failed = row_of(
        Outcome(case=case("torchft_diloco"), ended=FAILED, failure="host 2 ended; a\nb\nlast | one")
    )
    assert failed[-1] == "failed: host 2 ended; a … last / one"
    assert len(there) == len(cut) == len(failed)


def test_tables_come_from_the_cache(tmp_path: Path) -> None:
    cache = filled(
        tmp_path,
        outcome("bsp", (9.0, 0.88)),
        outcome("ddp", (9.0, 0.88), rate="50mbit"),
        outcome("ddp", (9.0, 0.88)),
        outcome("local_sgd", (9.0, 0.88), purpose=SEARCH, settings={"period": 4}),
    )
    main, search = tables(cache, "A question?")
    assert [(row[1], row[3]) for row in main.rows] == [("1gbit", "ddp"), ("1gbit", "bsp"), ("50mbit", "ddp")]
    assert [row[3] for row in search.rows] == ["local_sgd"]
    assert all(len(row) == len(main.columns) for row in main.rows)


def test_of_several_settings_those_count_that_ran_last(tmp_path: Path) -> None:
    at = [
        outcome("local_sgd", (seconds, 0.88), settings={"period": period}, **more)
        for period, seconds, more in (
            (32, 5.0, {}),
            (8, 6.0, {}),
            (8, 7.0, {"seed": 1}),
            (32, 4.0, {"rate": "50mbit"}),
        )
    ]
    main = tables(filled(tmp_path, *at), "A question?")[0]
    assert [(row[1], row[4], row[5]) for row in main.rows] == [
        ("1gbit", "period 8", "6.5 (6.0, 7.0)"),
        ("50mbit", "period 32", "4.0"),
    ]


def test_the_picture_shows_the_soonest_first_and_who_did_not_get_there(tmp_path: Path) -> None:
    cache = filled(
        tmp_path,
        outcome("ddp", (10.0, 0.5), (40.0, 0.86), ended=CUT),
        outcome("local_sgd", (4.0, 0.88)),
        outcome("local_sgd", (6.0, 0.88), seed=1),
        outcome("torchft_local_sgd", (10.0, 0.88)),
        outcome("no_exchange", (1.0, 0.9)),
        outcome("oscars", (20.0, 0.88), workers=STRAGGLER),
    )
    drawn = ElementTree.fromstring(render_chart(tables(cache, "A question?")[0].rows))
    texts = [element.text or "" for element in drawn.iter() if element.tag.endswith("text")]
    names = [text for text in texts if text in WORDS.values()]
    assert names == ["LocalSGD", "torchft LocalSGD", "torch DDP", "Oscars"], "the limit is no contender"
    assert [text for text in texts if text.startswith("1 Gbit/s")][-1].endswith("4x slower")
    assert any(text.startswith("not in 40 s") for text in texts)
    widths = [float(e.attrib["width"]) for e in drawn.iter() if e.attrib.get("height") == "16"]
    assert widths[0] == pytest.approx(widths[1] / 2, abs=0.1)
    assert "5.0 s (4.0 to 6.0), ends at 88.0%" in texts
    _, whisker = (e.attrib["d"] for e in drawn.iter() if e.attrib.get("class") == "range")
    first, last = map(float, re.findall(r"M([\d.]+) \d+v8", whisker))
    assert last - first == pytest.approx(widths[1] * 0.2, abs=0.2), "from 4 to 6 seconds"


def test_the_picture_of_the_documentation_is_that_of_the_newest_table() -> None:
    newest = max((ROOT / "benchmarks" / "results" / "peers").glob("????-??-??.md"))
    shown = (ROOT / "docs" / "peers.svg").read_text("utf-8")
    assert shown == render_chart(read_table(newest.read_text("utf-8"))), "python -m benchmarks.peers.chart"


def test_a_goal_is_met_by_the_soonest_that_is_accurate_enough(tmp_path: Path) -> None:
    cache = filled(
        tmp_path,
        outcome("ddp", (30.0, 0.87), (60.0, 0.88)),
        outcome("torchft_local_sgd", (12.0, 0.87), (15.0, 0.879)),
        outcome("no_exchange", (1.0, 0.88)),  # a limit, no contender
        outcome("local_sgd", (6.0, 0.87), (9.0, 0.8765)),  # sooner, but loses too much
        outcome("diloco", (10.0, 0.871), (12.0, 0.8771)),
        outcome("local_sgd", (1.0, 0.88), rate="50mbit"),  # no goal there
        outcome("local_sgd", (1.0, 0.88), workers="straggler"),
        outcome("selsync", (1.0, 0.88), purpose=SEARCH),
    )
    (goal,) = goals(cache)
    assert (goal.rate, goal.ours.case.contender) == ("1gbit", "diloco")
    assert goal.peer is not None
    assert goal.peer.case.contender == "torchft_local_sgd"
    assert goal.speedup == pytest.approx(1.2)
    assert goal.met
    assert "1.20x sooner" in str(goal)
    assert str(goal).endswith("met")


def test_a_goal_is_missed_by_time_or_by_accuracy(tmp_path: Path) -> None:
    ddp = outcome("ddp", (30.0, 0.87), (60.0, 0.88))
    peer = outcome("accelerate_local_sgd", (12.0, 0.88), rate="200mbit")
    late = filled(tmp_path / "late", ddp, peer, outcome("bsp", (8.1, 0.88), rate="200mbit"))
    (goal,) = goals(late)
    assert goal.ddp_final == 0.88  # of the run that went furthest, at another rate
    assert not goal.met
    worse = outcome("bsp", (4.0, 0.8702), (6.0, 0.8769), rate="200mbit")
    (goal,) = goals(filled(tmp_path / "worse", ddp, peer, worse))
    assert goal.speedup == pytest.approx(3.0)
    assert not goal.met
    good = outcome("bsp", (8.0, 0.878), rate="200mbit")
    (goal,) = goals(filled(tmp_path / "good", ddp, peer, good))
    assert goal.met


def test_without_ddp_there_is_no_goal_and_without_a_peer_at_the_target_it_is_met(tmp_path: Path) -> None:
    ours = outcome("local_sgd", (8.0, 0.88))
    assert goals(filled(tmp_path / "none", ours)) == []
    (goal,) = goals(filled(tmp_path / "one", ours, outcome("ddp", (40.0, 0.85), ended=CUT)))
    assert goal.speedup == math.inf
    assert "no peer reached it" in str(goal)


def test_lower_is_better_where_the_task_says_so() -> None:
    name = "shakespeare/gpt"
    assert TASKS[name].reached(TASKS[name].target - 0.1)
    assert not TASKS[name].reached(TASKS[name].target + 0.1)
    target = TASKS[name].target
    told = outcome("ddp", (1.0, target + 1), (2.0, target - 0.1), task=name)
    look = told.reached(target, higher_is_better=False)
    assert look is not None
    assert look.seconds == 2.0
