"""A launcher that is killed: its workers and their server end, and say why."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.limits import HANG_S
from tests.support.python import Python
from tests.support.server_ranks import gone
from tests.support.waiting import until

pytestmark = pytest.mark.processes

TRAINING = f"""
import os, sys
from pathlib import Path
sys.path[:0] = {[str(Path(__file__).parents[3])]!r}
import offbeat
from tests.support.counting import *
model = Counting(2)
optimizer = counting_optimizer(model)
with offbeat.attach(model, optimizer, offbeat.SSP(staleness=1), timeout_s={HANG_S}) as sync:
    count_on(model, optimizer)
    server = sync.port.client.transport.server_pid or 0
    (Path(sys.argv[1]) / os.environ["RANK"]).write_text(f"{{os.getpid()}} {{server}} .")
    while True:
        count_on(model, optimizer)
"""


def test_workers_and_shards_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with (tmp_path / "said").open("w") as said:
        launcher = Python(
            *(*torchrun, str(script), str(tmp_path)),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=said,
            stderr=subprocess.STDOUT,
        )
    notes = [tmp_path / str(rank) for rank in (0, 1)]
    until(lambda: all(note.exists() and note.read_text().endswith(".") for note in notes))
    pids = [int(pid) for note in notes for pid in note.read_text().split()[:2] if int(pid)]
    assert len(pids) == 3, "two workers and a shard"
    launcher.kill()
    launcher.wait()
    for pid in pids:
        until(lambda pid=pid: gone(pid))
    said_text = (tmp_path / "said").read_text()
    for rank in (0, 1):
        assert f"offbeat: rank {rank} ends: its launcher (process {launcher.pid}) has died" in said_text
