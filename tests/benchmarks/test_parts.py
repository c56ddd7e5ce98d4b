"""Parts of a benchmark: every unit is in one of them, and they take about as long."""

from __future__ import annotations

import argparse
import signal

import pytest
from benchmarks.support.parts import WHOLE, Part, exit_on_signals


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_parts_have_every_unit_once(count: int) -> None:
    units = [5.0, 1.0, 3.0, 3.0, 2.0]
    places = list(range(len(units)))
    parts = [Part(number, count).of(places, lambda place: units[place]) for number in range(1, count + 1)]
    assert sorted(place for part in parts for place in part) == places
    assert all(part == sorted(part) for part in parts), "in the order of the units"
    loads = [sum(units[place] for place in part) for part in parts]
    assert max(loads) <= max(5.0, sum(units) / count + 1)


def test_the_whole_is_one_part() -> None:
    assert WHOLE.of("abc", lambda _: 1.0) == ["a", "b", "c"]


def test_a_part_is_read_from_a_command_line() -> None:
    assert Part.parse("2/3") == Part(2, 3)
    for wrong in ("0/3", "4/3", "2", "2/", "/3", "-1/3", "a/b", "1/2/3"):
        with pytest.raises(argparse.ArgumentTypeError, match="K from 1 to N"):
            Part.parse(wrong)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_program_as_an_exception_does(number: signal.Signals) -> None:
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        exit_on_signals()
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(number)
        assert ended.value.code == 128 + number
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
