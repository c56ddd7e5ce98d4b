"""ASP: no worker waits for another."""

from __future__ import annotations

from offbeat import ASP
from tests.support.rules import of_clocks, pushed


def test_asp_waits_for_nobody() -> None:
    rule = ASP().rule()
    state = of_clocks(rule, 0, 0)
    assert all(pushed(rule, state, 0, clock) for clock in range(1, 100))
    assert rule.staleness_of(state, 0, 99) == 99
