"""Ray Train and Ray's actors, on a cluster of two nodes on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ray")

from tests.integrations.scripts import run
from tests.support.limits import HANG_S
from tests.support.returning import check_returned

LIMIT_S = 4 * HANG_S  # of all runs together
pytestmark = [pytest.mark.processes, pytest.mark.timeout(LIMIT_S + HANG_S)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of what all runs of the module have come to."""
    found = tmp_path_factory.mktemp("ray")
    usage = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1"}
    run([sys.executable, "-m", "tests.integrations.loops.ray_runs", str(found)], found, LIMIT_S, **usage)
    return found


def equal(one: Any, other: Any) -> bool:
    """Return whether two states are the same, bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def test_worker_that_died_resumes_from_the_checkpoint_of_ray(folder: Path) -> None:
    assert (folder / "checkpoints" / "died").exists()
    whole, resumed = (
        torch.load(folder / "checkpoints" / f"{name}.pt") for name in ("never stopped", "resumed")
    )
    assert set(whole) == set(resumed) == {"shared.pt", "offbeat-0-of-2.pt", "offbeat-1-of-2.pt"}
    assert whole["shared.pt"]["epoch"] == 2
    assert equal(whole, resumed)
    states = [whole[f"offbeat-{rank}-of-2.pt"][f"rank{rank}"] for rank in range(2)]
    assert not equal(*states), "each worker has its own weights between two averages"


def test_worker_that_ray_restarts_alone_rejoins(folder: Path) -> None:
    assert (folder / "elastic" / "died").exists()
    workers = torch.load(folder / "elastic" / "elastic.pt")
    check_returned(workers)
    assert len({worker["node"] for worker in workers}) == 2


def test_example_of_ray_trains_what_it_trains_under_ddp(folder: Path) -> None:
    losses = torch.load(folder / "own_example" / "losses.pt")
    assert losses["bsp"] == losses["ddp"] is not None
