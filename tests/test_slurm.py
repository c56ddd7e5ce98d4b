"""The batch script of examples/slurm, in a real Slurm where one is installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.slurm import Slurm, missing_slurm

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(missing_slurm()), reason=f"needs Slurm: {missing_slurm()}"),
]

WORKER = Path(__file__).parent / "support" / "slurm_worker.py"


def test_four_tasks_train_one_model(tmp_path: Path) -> None:
    with Slurm() as slurm:
        output = slurm.submit("examples/slurm/train.sbatch", str(WORKER), str(tmp_path))
    assert output.startswith("COMPLETED"), output
    seen = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert sorted(worker["rank"] for worker in seen) == [0, 1, 2, 3]
    assert sorted(worker["local_rank"] for worker in seen) == [0, 1, 2, 3]
    assert {worker["world"] for worker in seen} == {4}
    assert all(worker["losses"][-1] < worker["losses"][0] / 10 for worker in seen)
    assert len({worker["before"] for worker in seen}) == 4  # each has trained on its own data …
    assert len({worker["after"] for worker in seen}) == 1  # … and all end with one model
