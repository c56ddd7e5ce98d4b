"""The settings of a training run: its length, and the samples that each worker draws."""

from __future__ import annotations

import pytest

from offbeat import BSP
from offbeat.errors import SettingError
from tests.support.virtual_runs import Kept, cluster_of, play

pytestmark = pytest.mark.virtual


def test_more_workers_than_samples_is_told_before_anything_is_built() -> None:
    task = Kept(samples=3)
    with pytest.raises(SettingError, match="4 workers, but only 3 samples"):
        play(cluster_of(*[0.1] * 4), BSP(), 2, task=task)
    assert not task.built
