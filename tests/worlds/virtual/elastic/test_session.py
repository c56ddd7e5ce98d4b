"""Sessions that begin after others, with their state and clock. Seconds are in test_crew.py."""

from __future__ import annotations

import pytest
import torch

from offbeat import LocalSGD
from offbeat.worlds.virtual.cluster import Absence
from tests.support.elastic_forms import periodic
from tests.support.elastic_virtual import play_elastic
from tests.support.virtual_runs import cluster_of

pytestmark = pytest.mark.virtual


def test_worker_that_comes_late_joins() -> None:
    late = Absence(worker=2, from_s=0.0, until_s=2.5)
    run = play_elastic(cluster_of(1.0, 1.0, 1.0, away=(late,)), LocalSGD(period=3), 9)
    assert run.ends[2].joined_at == 3
    assert [len(roster) for roster in run.ends[0].rosters] == [2, 2, 2, 3, 3, 3, 3, 3, 3]
    torch.testing.assert_close(run.ends[2].weights, periodic(LocalSGD(period=3), run.rosters()))
