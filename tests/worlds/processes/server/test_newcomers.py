"""Connections that have not joined: few, and none for long."""

from __future__ import annotations

import pytest

from offbeat.worlds.processes.server import newcomers
from offbeat.worlds.processes.server.newcomers import MOST, Newcomers


class Line:
    """Stands in for a connection."""

    ended = False

    def end(self) -> None:
        self.ended = True


def test_one_too_many_ends_the_oldest_and_those_that_joined_are_left_alone() -> None:
    lines, new = [Line() for _ in range(MOST + 3)], Newcomers()
    new.add(lines[0])  # type: ignore[arg-type]
    new.remove(lines[0])  # type: ignore[arg-type]
    new.remove(lines[0])  # type: ignore[arg-type]
    for line in lines[1:]:
        new.add(line)  # type: ignore[arg-type]
    assert len(new) == MOST
    assert [line.ended for line in lines] == [False, True, True] + [False] * MOST


def test_one_that_does_not_join_in_time_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(newcomers.time, "monotonic", lambda: now_s[0])
    new, lines = Newcomers(), [Line(), Line()]
    new.add(lines[0])  # type: ignore[arg-type]
    now_s[0] += 6
    new.add(lines[1])  # type: ignore[arg-type]
    now_s[0] += 5
    new.end_late()
    assert [line.ended for line in lines] == [True, False]
    assert len(new) == 1
