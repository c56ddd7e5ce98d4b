"""DSSP: credit beyond the lower bound, never beyond the upper one, as the controller predicts."""

from __future__ import annotations

from typing import Any

import pytest

from offbeat import DSSP, SettingError
from offbeat.server.messages import Push
from offbeat.strategies.dssp import DynamicStaleness
from tests.support.rules import of_clocks, pushed


def paced(
    low: int, high: int, mine: tuple[float, float], theirs: tuple[float, float]
) -> tuple[DynamicStaleness, Any]:
    """Worker 0 is `low` ahead of worker 1; these are the times of their two latest pushes."""
    rule = DSSP(low=low, high=high, overlap=False).rule()
    state = of_clocks(rule, 10 + low, 10)
    state.times = {0: mine, 1: theirs}
    return rule, state


def test_dssp_within_low_is_ssp() -> None:
    rule = DSSP(low=2, high=2, overlap=False).rule()
    state = of_clocks(rule, 0, 0)
    assert [pushed(rule, state, 0, clock, clock) for clock in (1, 2, 3)] == [True, True, False]
    assert pushed(rule, state, 1, 1)
    assert rule.admits(state, 0, 3)


def test_the_controller_predicts_where_pushes_meet() -> None:
    """The fast one pushes every second and is at 10 s; the slow one every 4 s, last at 9.5 s: next at 13.5,
    17.5 and so on. After r more steps the fast one is at 10 + r: 3.5 s from it, 2.5, 1.5, 0.5 at r = 3, and
    0.5 again at r = 4: the lesser counts. 11 to 17 are all within what `high` allows.
    """
    rule, state = paced(3, 15, (8.0, 9.0), (5.5, 9.5))
    assert pushed(rule, state, 0, 14, 10.0), "it is granted 3, and this push spends the first"
    assert state.credit[0] == 2
    assert pushed(rule, state, 0, 15, 11.0)
    assert pushed(rule, state, 0, 16, 12.0)
    assert state.credit[0] == 0
    assert not pushed(rule, state, 0, 17, 13.0), "the slow one is due in half a second: no step is nearer"


def test_no_credit_where_waiting_now_is_best() -> None:
    """Now, at 10 s, the slow one is due at 10.1 s; every 3 s against every 5.1 s is never so near again."""
    rule, state = paced(3, 15, (4.0, 7.0), (-0.1, 5.0))
    assert not pushed(rule, state, 0, 14, 10.0)
    assert state.credit[0] == 0
    assert rule.grant(state, 0) == 0


def test_a_later_push_of_the_slowest_may_be_the_nearest() -> None:
    """Both at 12 s, every 3 s against every 4 s: 15, 18, 21, 24 and 16, 20, 24 meet after four steps."""
    rule, state = paced(2, 9, (6.0, 9.0), (8.0, 12.0))
    assert pushed(rule, state, 0, 13, 12.0)
    assert state.credit[0] == 3, "four granted, one spent"


def test_credit_never_reaches_beyond_high() -> None:
    rule, state = paced(1, 4, (8.0, 9.0), (0.0, 9.0))  # the slow one is predicted at 18 s, 8 steps away
    gaps = []
    clock = 12
    while pushed(rule, state, 0, clock, clock - 2.0):
        gaps.append(rule.staleness_of(state, 0, clock))
        clock += 1
    assert gaps == [2, 3, 4]
    assert pushed(rule, state, 1, 11, 18.0) and not rule.admits(state, 0, 15)
    for late in range(12, 15):
        assert pushed(rule, state, 1, late, 18.0)
    assert rule.admits(state, 0, 15), "it has waited until the gap was `low`"


def test_only_the_fastest_is_given_credit() -> None:
    rule = DSSP(low=1, high=10, overlap=False).rule()
    state = of_clocks(rule, 6, 5, 2)
    state.times = {0: (5.0, 6.0), 1: (5.0, 6.0), 2: (0.0, 6.0)}
    assert not pushed(rule, state, 1, 5, 7.0)
    assert pushed(rule, state, 0, 7, 7.0)


def test_without_two_pushes_of_the_slowest_there_is_nothing_to_predict() -> None:
    rule = DSSP(low=0, high=5).rule()
    state = of_clocks(rule, 0, 0)
    assert not pushed(rule, state, 0, 1, 1.0)


def test_who_leaves_takes_its_credit_along() -> None:
    rule, state = paced(1, 10, (8.0, 9.0), (0.0, 9.0))
    assert pushed(rule, state, 0, 12, 10.0) and state.credit[0]
    rule.leave(state, 0)
    assert rule.join(state, 0, None) == 10
    assert rule.members(state) == [1, 0]
    assert not state.credit.get(0) and 0 not in state.free and 0 not in state.times


def test_the_controller_counts_from_where_weights_will_be_used() -> None:
    """As above, one step later: at clock 13 it asks for what it will use at 14, four ahead of the slowest."""
    rule = DSSP(low=3, high=15).rule()
    assert rule.ahead == 1
    state = of_clocks(rule, 12, 10)
    state.times = {0: (8.0, 9.0), 1: (5.5, 9.5)}
    rule.advance(state, Push(worker=0, clock=13, update=[], at_s=10.0))
    assert state.credit[0] == 2, "three granted, one spent"
    assert rule.admits(state, 0, 14) and rule.staleness_of(state, 0, 14) == 4


def test_credit_reaches_no_further_where_weights_are_used_later() -> None:
    rule = DSSP(low=1, high=4).rule()
    state = of_clocks(rule, 10, 10)
    state.times = {0: (7.0, 8.0), 1: (0.0, 8.0)}
    gaps, clock = [], 11
    while True:
        rule.advance(state, Push(worker=0, clock=clock, update=[], at_s=clock - 2.0))
        if not rule.admits(state, 0, clock + 1):
            break
        gaps.append(rule.staleness_of(state, 0, clock + 1))
        clock += 1
    assert gaps == [2, 3, 4]


@pytest.mark.parametrize(
    ("bad", "words"),
    [({"low": 4, "high": 3}, "low=4, high=3"), ({"low": -1}, "low=-1"), ({"high": 2.5}, "high=2.5")],
    ids=str,
)
def test_bad_settings_are_refused(bad: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        DSSP(**bad)
