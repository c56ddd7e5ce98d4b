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


def test_workers_are_the_nodes_of_a_zone_and_are_lost_together() -> None:
    """By hand: read from the entry with three machines, over and over; worker 3 is node 0 of another zone."""
    trace = SpotTrace(10.0, (3, 1, 0, 2))
    away = [[(a.from_s, a.until_s) for a in trace.absences(worker, 0, 80.0)] for worker in range(6)]
    assert away[0] == [(20, 30), (60, 70)]
    assert away[1] == [(10, 30), (50, 70)]
    assert away[2] == [(10, 40), (50, 80)]
    assert away[3:] == away[:3], "there is one entry with three machines"


def test_each_zone_reads_the_trace_from_an_offset_of_its_own() -> None:
    trace = SpotTrace(10.0, (2, 2, 1, 0, 2))
    by_offset = {(20, 40): (30, 40), (10, 30): (20, 30), (30, 50): (40, 50)}  # node 1: node 0
    seen = set()
    for zone in range(20):
        first, second = (trace.absences(2 * zone + node, 0, 50.0)[0] for node in (0, 1))
        assert by_offset[second.from_s, second.until_s] == (first.from_s, first.until_s)
        seen.add(second.from_s)
    assert seen == {10, 20, 30}


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
