"""Rounds of several shards: each shard ends its own, and a worker waits for the last of them."""

from __future__ import annotations

import pytest

from tests.support.oscars_shards import SEND_S, Troupe

BEST = 4 * 0.5 / (4 * 0.5 * 1.02 + 2.3 * SEND_S)  # rounds of four steps, as long as the slowest of all


def test_undisturbed_all_compute_but_for_the_exchange() -> None:
    troupe = Troupe(shards=4, workers=8, seed=0)
    troupe.run(100.0)
    assert troupe.busy(from_s=20.0) > BEST - 0.01


@pytest.mark.parametrize("seed", range(40, 46))
def test_shards_find_back_into_phase(seed: int) -> None:
    """A worker is killed every 5 s and a shard stands still now and then, after which the deadlines of the
    shards are apart. A worker's update then comes too late for one shard and too early for another: where
    each keeps to its deadlines, all workers wait for half of the time, for minutes."""
    troupe = Troupe(shards=4, workers=8, seed=seed)
    for second in range(20, 400, 5):
        troupe.at(second, troupe.kill, 0.3)
    for second in range(60, 400, 60):
        troupe.at(second + 0.37 * (seed - 40), troupe.stall, troupe.rng.uniform(0.3, 3.0))
    troupe.run(400.0)
    assert troupe.busy(from_s=20.0) > 0.9 * BEST
