"""PushPull: when the pull of a step overlaps with the computation of the next."""

from __future__ import annotations

from typing import Any

import pytest

from offbeat import ASP, DSSP, SSP


@pytest.mark.parametrize(
    ("strategy", "overlaps"),
    [
        (ASP(), True),
        (ASP(overlap=False), False),
        (SSP(staleness=0), False),
        (SSP(staleness=1), True),
        (SSP(staleness=1, overlap=False), False),
        (DSSP(low=0, high=4), False),
        (DSSP(low=1, high=1), True),
        (DSSP(low=1, high=4, overlap=False), False),
    ],
    ids=str,
)
def test_pulls_overlap_where_the_bound_leaves_room(strategy: Any, overlaps: bool) -> None:
    assert strategy.overlaps is overlaps
