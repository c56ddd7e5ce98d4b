"""GSSP by itself: groups by number, and the settings that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from offbeat import GSSP, SettingError
from offbeat.strategies.gssp import assigned
from offbeat.strategies.gssp.rule import GroupRule


def test_groups_by_number() -> None:
    assert assigned("auto") == ()
    assert assigned("0-3,6/4,5") == ((0, 1, 2, 3, 6), (4, 5))
    assert assigned("2") == ((2,),)
    rule = GSSP(groups="0/1").rule()
    assert isinstance(rule, GroupRule) and rule.fixed == ((0,), (1,))


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"groups": "fast"}, "auto"),
        ({"groups": ""}, "auto"),
        ({"groups": "0/"}, "auto"),
        ({"groups": "0,1/1"}, "once"),
        ({"groups": "3-1"}, "empty range"),
        ({"window": 0}, "at least 1"),
        ({"likeness": 0.9}, "at least 1"),
        ({"likeness": float("nan")}, "at least 1"),
        ({"staleness": -1}, "0 or more"),
    ],
)
def test_bad_settings_are_refused(bad: dict[str, Any], match: str) -> None:
    with pytest.raises(SettingError, match=match):
        GSSP(**bad)
