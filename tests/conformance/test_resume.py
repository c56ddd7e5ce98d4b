"""Stop, build everything anew, load, go on: equal to never having stopped."""

from __future__ import annotations

import pytest

from tests.conformance.table import Case, every_repeating_case
from tests.support.resumed import resumed_run, straight_run


@every_repeating_case
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_resumed_equals_never_stopped(crew, case: Case, optimizer: str) -> None:
    straight = crew(2).run(straight_run, case.strategy, optimizer)
    for stop in (4, 7):
        stopped = crew(2).run(resumed_run, case.strategy, optimizer, stop)
        for one, other in zip(straight, stopped, strict=True):
            assert case.same(one, other), f"stopped after step {stop}"
