"""SSP: a worker goes on up to its staleness bound and no further."""

from __future__ import annotations

from typing import Any

import pytest

from offbeat import SSP, SettingError
from tests.support.rules import of_clocks, pushed


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_ssp_goes_on_up_to_its_bound_and_no_further(staleness: int) -> None:
    rule = SSP(staleness=staleness).rule()
    state = of_clocks(rule, 0, 0)
    for clock in range(1, staleness + 1):
        assert pushed(rule, state, 0, clock)
        assert rule.staleness_of(state, 0, clock) == clock
    assert not pushed(rule, state, 0, staleness + 1)
    assert pushed(rule, state, 1, 1)
    assert rule.admits(state, 0, staleness + 1)
    assert rule.staleness_of(state, 0, staleness + 1) == staleness


@pytest.mark.parametrize("staleness", [-1, 1.5, "3"])
def test_bad_settings_are_refused(staleness: Any) -> None:
    with pytest.raises(SettingError, match=f"staleness={staleness!r}"):
        SSP(staleness=staleness)
