"""The batch scripts of examples/slurm, in a real Slurm where one is installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.returning import check_returned
from tests.support.slurm import Slurm, missing_slurm

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(missing_slurm()), reason=f"needs Slurm: {missing_slurm()}"),
]

SUPPORT = Path(__file__).parent / "support"


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with Slurm() as started:
        yield started


def test_four_tasks_train_one_model(slurm: Slurm, tmp_path: Path) -> None:
    output = slurm.submit("examples/slurm/train.sbatch", str(SUPPORT / "slurm_worker.py"), str(tmp_path))
    assert output.startswith("COMPLETED"), output
    seen = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert sorted(worker["rank"] for worker in seen) == [0, 1, 2, 3]
    assert sorted(worker["local_rank"] for worker in seen) == [0, 1, 2, 3]
    assert {worker["world"] for worker in seen} == {4}
    assert all(worker["losses"][-1] < worker["losses"][0] / 10 for worker in seen)
    assert len({worker["before"] for worker in seen}) == 4  # each has trained on its own data …
    assert len({worker["after"] for worker in seen}) == 1  # … and all end with one model


def test_killed_worker_comes_back_while_the_others_train_on(slurm: Slurm, tmp_path: Path) -> None:
    output = slurm.submit("examples/slurm/elastic.sbatch", str(SUPPORT / "returning.py"), str(tmp_path))
    assert output.startswith("COMPLETED"), output
    assert (tmp_path / "died").exists()
    check_returned([json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)])
