"""Rounds of several shards: each shard ends its own, and a worker waits for the last of them."""

from __future__ import annotations

import pytest

from tests.support.oscars_shards import SEND_S, STEP_S, Troupe

BEST = 4 * STEP_S / (4 * STEP_S * 1.02 + 2.3 * SEND_S)  # rounds of four steps, as long as the slowest of all


def test_undisturbed_all_compute_but_for_the_exchange() -> None:
    troupe = Troupe(shards=4, workers=8, seed=0)
    troupe.run(100.0)
    assert troupe.busy(from_s=20.0) > BEST - 0.01


@pytest.mark.parametrize("seed", range(40, 44))
@pytest.mark.parametrize("fault", ["stall", "crash"])
def test_shards_find_back_into_phase(seed: int, fault: str) -> None:
    """A worker is killed every 5 s, and a shard stands still or crashes now and then, after which the
    deadlines of the shards are apart. A worker's update then comes too late for one shard and too early for
    another: where each kept to its deadlines, all workers waited for half of the time, for minutes."""
    troupe = Troupe(shards=4, workers=8, seed=seed)
    for second in range(20, 400, 5):
        troupe.at(second, troupe.kill, 0.3)
    for second in range(60, 400, 60):
        troupe.at(second + 0.37 * (seed - 40), getattr(troupe, fault), troupe.rng.uniform(0.3, 3.0))
    troupe.run(400.0)
    assert troupe.busy(from_s=20.0) > 0.93 * BEST


@pytest.mark.parametrize("seed", range(40, 44))
@pytest.mark.parametrize("workers", [2, 4, 8])
def test_workers_that_wait_for_each_other_in_the_loop_push_in_the_same_step(workers: int, seed: int) -> None:
    """One that waits at the server holds up one that waits for it in the loop: only deadlines let them go on.
    Where they pushed in different steps they did so for good, and every wait made the next round longer."""
    troupe = Troupe(shards=2, workers=workers, seed=seed, spread=0.3, together=True)
    troupe.at(20.2, troupe.shift)
    troupe.run(400.0)
    assert troupe.busy(from_s=100.0) > 0.75
