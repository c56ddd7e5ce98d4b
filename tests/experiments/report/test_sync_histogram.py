"""The histogram of synchronized steps."""

from __future__ import annotations

from itertools import accumulate

import pytest

from offbeat.experiments.report.sync_histogram import MOST, SyncHistogram


@pytest.mark.parametrize("steps", [0, 1, MOST, MOST + 1, 2 * MOST, 2 * MOST + 1, 4 * MOST + 7, 5 * MOST])
def test_decisions_are_few_and_lose_no_step(steps: int) -> None:
    synced = [step % 7 == 0 or step % 11 == 3 for step in range(steps)]
    decisions = SyncHistogram()
    for total in accumulate(map(int, synced)):
        decisions.step(total)
    known = decisions.to_json()
    assert known["steps"] == steps
    assert len(known["synced"]) <= MOST
    width = known["width"]
    assert known["synced"] == [sum(synced[k : k + width]) for k in range(0, steps, width)]
    assert MOST * width < 2 * max(steps, MOST), "no coarser than it must be"
