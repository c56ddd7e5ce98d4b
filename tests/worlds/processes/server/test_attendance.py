"""Who has joined a shard, who went away without a word, and who may still return."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from offbeat.worlds.processes.server import attendance
from offbeat.worlds.processes.server.attendance import RETURN_S, Attendance
from tests.support.shards import shard_config


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(attendance.time, "monotonic", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def attendance_of(path: Path, known: Iterable[int] = (), *, workers: int = 2) -> Attendance:
    return Attendance(replace(shard_config(path), workers=workers), known)


def test_it_is_complete_when_all_have_joined_even_if_some_have_left(clock: Clock, tmp_path: Path) -> None:
    workers = attendance_of(tmp_path)
    workers.note(0, 0)
    workers.note(0, 0)
    assert not workers.complete and workers.joined == 1
    workers.note(1, 0)
    workers.lose(1, silent=True)
    assert workers.complete


def test_an_acknowledged_push_proves_that_all_had_joined(clock: Clock, tmp_path: Path) -> None:
    workers = attendance_of(tmp_path, known=[0])
    assert not workers.complete, "the snapshot knows one of two"
    workers.note(0, 1)
    assert workers.complete
    assert workers.may_return(), "the other may be on its way"
    clock.now_s += RETURN_S
    assert not workers.may_return()


def test_those_of_the_snapshot_may_return_for_a_while(clock: Clock, tmp_path: Path) -> None:
    workers = attendance_of(tmp_path, known=[0, 1])
    workers.note(0, 1)
    assert workers.may_return()
    workers.note(1, 1)
    assert not workers.may_return(), "all are back"


def test_one_that_was_away_for_too_long_is_forgotten(clock: Clock, tmp_path: Path) -> None:
    workers = attendance_of(tmp_path)
    workers.note(0, 0)
    workers.note(1, 0)
    workers.lose(0, silent=False)
    workers.lose(1, silent=True)
    assert workers.has_forgotten(1), "who was removed as silent was away for too long by then"
    clock.now_s += shard_config(tmp_path).silence_s
    assert not workers.has_forgotten(0)
    clock.now_s += 0.1
    assert workers.has_forgotten(0)
