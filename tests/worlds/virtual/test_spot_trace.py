"""Traces of spot preemptions: which absences they give, and what is refused, with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offbeat.errors import SettingError
from offbeat.worlds.virtual.spot_trace import SpotTrace, is_spot_trace, load_spot_trace

DATA = (1, 0, 0, 1, 1, 0)
TRACE = SpotTrace(10.0, DATA)


def test_each_worker_reads_the_trace_from_an_offset_of_its_own() -> None:
    """By hand: the trace read from entry 0, 3 or 4, over and over."""
    by_offset = {
        0: [(10, 30), (50, 60), (70, 90), (110, 120)],
        3: [(20, 30), (40, 60), (80, 90), (100, 120)],
        4: [(10, 20), (30, 50), (70, 80), (90, 110)],
    }
    seen = set()
    for worker in range(20):
        away = [(absence.from_s, absence.until_s) for absence in TRACE.absences(worker, 0, 120.0)]
        offset = next(offset for offset, periods in by_offset.items() if periods == away)
        seen.add(offset)
    assert seen == {0, 3, 4}, "never at an entry without a machine"
    assert TRACE.absences(0, 0, 60.0) == [a for a in TRACE.absences(0, 0, 120.0) if a.from_s < 60]
    assert TRACE.seconds == 60.0


def test_a_worker_is_one_node_of_several() -> None:
    """Node 0 is there for the entries 0, 1 and 2, node 1 for 1 and 2, node 2 for 2 alone."""
    trace = SpotTrace(10.0, (1, 2, 3, 0))
    by_node = {
        0: ({(30, 40), (70, 80)}, {(20, 30), (60, 70)}, {(10, 20), (50, 60)}),
        1: ({(20, 40), (60, 80)}, {(10, 30), (50, 70)}),
        2: ({(10, 40), (50, 80)},),
    }
    seen = set()
    for worker in range(60):
        away = {(absence.from_s, absence.until_s) for absence in trace.absences(worker, 0, 80.0)}
        seen |= {node for node, periods in by_node.items() if away in periods}
        assert any(away in periods for periods in by_node.values()), away
    assert seen == {0, 1, 2}


def test_an_absence_goes_on_past_the_end_of_the_schedule_and_of_the_trace() -> None:
    wrapped = SpotTrace(1.0, (0, 1, 0))
    assert [(a.from_s, a.until_s) for a in wrapped.absences(0, 0, 1.5)] == [(1.0, 3.0)]


def test_a_file_of_the_format_is_read(tmp_path: Path) -> None:
    file = tmp_path / "spot.json"
    file.write_text(json.dumps({"metadata": {"gap_seconds": 10, "zone": "a"}, "data": DATA}))
    assert load_spot_trace(file) == TRACE
    assert is_spot_trace(file)
    file.write_text('{"data": [0, true],\r\n "metadata" : {"gap_seconds": 2.5}}')
    assert load_spot_trace(file) == SpotTrace(2.5, (0, 1))
    file.write_text('{"traceEvents": []}')
    assert not is_spot_trace(file)
    assert not is_spot_trace(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ('{"metadata":\n {"gap_seconds": 300},\n "data": [0, 1\n', 4, "not JSON: "),
        ("[0, 1]", 1, "the trace: expected an object"),
        ('{"data": [0, 1]}', 1, "metadata: missing"),
        ('{"data": [0],\n "metadata": 300}', 2, "metadata: expected an object"),
        ('{"data": [0],\n "metadata":\n {}}', 3, "gap_seconds: missing"),
        ('{"metadata": {\n"gap_seconds": "300"}, "data": [0]}', 2, "gap_seconds: expected a number of"),
        ('{"metadata": {"gap_seconds": true}, "data": [0]}', 1, "gap_seconds: expected a number of"),
        ('{"metadata": {"gap_seconds": 0}, "data": [0]}', 1, "gap_seconds: expected a number of"),
        ('{"metadata": {"gap_seconds": 9},\n"data": 0}', 2, "data: expected a list of numbers of machines"),
        ('{"metadata": {"gap_seconds": 9},\n"data": []}', 2, "data: expected a list of numbers of machine"),
        ('{"metadata": {"gap_seconds": 9},\n"data": [0,\n0,\n-1]}', 4, "data[2]: expected how many machin"),
        ('{"metadata": {"gap_seconds": 9},\n"data": [0, null]}', 2, "data[1]: expected how many machines a"),
        ('{"metadata": {"gap_seconds": 9},\n"data": [0, 0.5]}', 2, "data[1]: expected how many machines ar"),
        ('{"metadata": {"gap_seconds": 9},\n"data": [0, 0]}', 2, "data: no machine is ever available, so n"),
    ],
)
def test_a_mistake_is_told_with_its_line(tmp_path: Path, text: str, line: int, problem: str) -> None:
    file = tmp_path / "spot.json"
    file.write_text(text)
    with pytest.raises(SettingError) as told:
        load_spot_trace(file)
    assert str(told.value).startswith(f"{file}, line {line}: {problem}")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_bytes(b"\xff\xfe")
    for file, reason in ((tmp_path / "none.json", "No such file"), (tmp_path / "odd.json", "not UTF-8")):
        with pytest.raises(SettingError, match=f"{file.name}: the trace cannot be read: .*{reason}"):
            load_spot_trace(file)
