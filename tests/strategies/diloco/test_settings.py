"""The settings of DiLoCo: what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from offbeat import DiLoCo, SettingError


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"period": 0}, "period=0: a whole number, at least 1"),
        ({"period": 2.5}, "period=2.5"),
        ({"fragments": True}, "fragments=True: a whole number, at least 1"),
        ({"period": 12, "fragments": 5}, "fragments=5: must divide period=12: 1, 2, 3, 4, 6, 12"),
        ({"delay": -1}, "delay=-1: a whole number, 0 or more"),
        ({"period": 12, "fragments": 3, "delay": 4}, "delay=4: from 0 to 3"),
        ({"period": 1, "delay": 1}, "delay=1: from 0 to 0"),
        ({"outer_lr": 0}, "outer_lr=0: a finite number above 0"),
        ({"outer_lr": float("nan")}, "outer_lr=nan"),
        ({"outer_lr": "fast"}, "outer_lr='fast'"),
        ({"outer_momentum": 1.0}, "outer_momentum=1.0: a number from 0 to below 1"),
        ({"mix": -0.1}, "mix=-0.1: a number from 0 to below 1"),
        ({"mix": None}, "mix=None"),
        ({"average": 1.0}, "average=1.0: a number from 0 to below 1"),
        ({"offload": "disk"}, "offload='disk': choose one of none, cpu"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(bad: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        DiLoCo(**bad)
