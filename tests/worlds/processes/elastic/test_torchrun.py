"""The recipe of docs/clusters.md: a torchrun for each worker, which starts that worker again, alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.limits import HANG_S
from tests.support.python import Python
from tests.support.returning import check_returned

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[4]
WORKERS = 2
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "--max-restarts", "3"]


def test_worker_that_torchrun_restarts_alone_rejoins(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    store = ["-m", "offbeat", "rendezvous", "127.0.0.1:0"]
    workers: list[Python] = []
    with Python(*store, stdout=subprocess.PIPE, text=True, env=environment) as rendezvous:
        try:
            assert rendezvous.stdout is not None
            name, _, address = rendezvous.stdout.readline().split()[4].partition("=")
            for rank in range(WORKERS):
                variables = ["env", f"RANK={rank}", f"WORLD_SIZE={WORKERS}"]
                script = [sys.executable, str(ROOT / "tests" / "support" / "returning.py"), str(tmp_path)]
                command = [*TORCHRUN, "--no-python", *variables, *script]
                workers.append(Python(*command, env={**environment, name: address}))
            assert [worker.wait(HANG_S) for worker in workers] == [0] * WORKERS
        finally:
            for process in [*workers, rendezvous]:
                process.kill()
                process.wait()
    assert (tmp_path / "died").exists()
    check_returned([json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(WORKERS)])
