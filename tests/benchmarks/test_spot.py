"""The benchmark spot: the facts of a trace, and what it says without the traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.support import tables
from benchmarks.virtual_time import spot
from benchmarks.virtual_time.spot_facts import FACTS, describe

from offbeat.worlds.virtual.spot_trace import SpotTrace


def test_the_facts_of_a_trace_of_two_nodes() -> None:
    """By hand: node 0 is there for 6 of 8 entries and lost once, node 1 for 4 and lost three times."""
    facts = dict(zip(FACTS[1:], describe(SpotTrace(3600.0, (0, 2, 1, 2, 0, 2, 2, 1))), strict=True))
    assert facts["nodes"] == "2"
    assert facts["time available (%)"] == "62.5"
    assert facts["preemptions"] == "4"
    assert facts["mean life (h)"] == "2.50"
    assert facts["no node there (% of the time)"] == "25.0"
    assert facts["the same if nodes were independent"] == "12"
    assert "–" in describe(SpotTrace(30.0, (0, 1, 1)))


def test_as_many_preemptions_are_counted_as_a_worker_meets() -> None:
    trace = SpotTrace(10.0, (1, 0, 0, 1, 1, 0))  # no life crosses its end
    assert describe(trace)[4] == str(len(trace.absences(0, 0, trace.seconds)))


@pytest.mark.parametrize("folder", [None, "elsewhere"])
def test_without_the_traces_it_says_where_they_are(
    folder: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        spot.main([] if folder is None else ["--traces", folder])
    assert "clone the repository skypilot-org/spot-traces from GitHub" in capsys.readouterr().err


@pytest.mark.virtual
def test_a_trace_is_planned_for_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(spot, "TRACES", ("a.json",))
    monkeypatch.setattr(spot, "STRATEGIES", spot.STRATEGIES[:2])
    monkeypatch.setattr(spot, "SEEDS", (0,))
    monkeypatch.setattr(spot, "TARGET", 0.3)
    trace = {"metadata": {"gap_seconds": 300}, "data": [1, 1, 1, 0] * 5}
    (tmp_path / "a.json").write_text(json.dumps(trace))
    spot.main(["--traces", str(tmp_path)])
    pages = sorted((tmp_path / "results" / "spot").glob("*.md"))
    assert len(pages) == 2
    text = pages[1].read_text() if pages[0].stem.endswith("traces") else pages[0].read_text()
    assert "**Verdict**: of 1 traces" in text
    assert text.count("| a.json |") == text.count("| none |") == 2
