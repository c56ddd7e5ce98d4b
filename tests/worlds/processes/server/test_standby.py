"""The supervisor of a shard is killed, and then the shard: another rank starts it again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import offbeat
from offbeat import SSP
from offbeat.worlds.processes.server import bootstrap, standby, supervisor
from offbeat.worlds.processes.server.signed_store import SignedStore
from offbeat.worlds.processes.server.snapshots import Snapshots
from offbeat.worlds.processes.server.standby import is_running
from tests.support.counting import Counting, count_on, counting_optimizer
from tests.support.crew import Crew
from tests.support.limits import HANG_S
from tests.support.lost import patched, wait_for_all_but
from tests.support.waiting import until

pytestmark = pytest.mark.processes

STEPS, AT = 12, 4


def test_a_zombie_does_not_run() -> None:
    assert is_running(os.getpid())
    process = subprocess.Popen([sys.executable, "-c", ""])
    until(lambda: not is_running(process.pid))  # it has ended, and nobody has asked how
    process.wait()
    assert not is_running(process.pid)


def _orphaned(patch: pytest.MonkeyPatch) -> tuple[int, int, int]:
    """Rank 0 kills itself, and rank 1 then its shard. The steps, and the shard's process before and after."""
    rank = dist.get_rank()
    patch.setattr(supervisor, "QUICKLY_S", 0.0)
    patch.setattr(bootstrap, "SNAPSHOT_S", 0.05)
    patch.setattr(standby, "CHECK_S", 0.05)
    wait_for_all_but(0, patch)
    model = Counting(dist.get_world_size())
    optimizer = counting_optimizer(model)
    sync = offbeat.attach(model, optimizer, SSP(staleness=1), timeout_s=HANG_S)
    links: Any = sync.port.client.transport  # type: ignore[union-attr]
    store = links.channels[0]._store
    signed = SignedStore(store, links.channels[0]._identity.token)
    first, shard = (int(signed.get(f"{kind}/0")) for kind in ("supervisor", "process"))
    shots = Snapshots(Path(links._supervisor._config.snapshot if rank == 0 else ""), 1.0)
    for step in range(1, STEPS + 1):
        count_on(model, optimizer)
        if step == AT and rank == 0:
            until(lambda: (memory := shots.read()) and memory.applied[0] >= 1)
            os.kill(os.getpid(), signal.SIGKILL)
        if step == AT + 2 and rank == 1:
            until(lambda: int(signed.get("supervisor/0")) != first)
            os.kill(shard, signal.SIGKILL)
            until(lambda: int(signed.get("process/0")) != shard)
    store.set(f"done/{rank}", "")
    until(lambda: store.check(["done/1", "done/2"]))
    with pytest.raises(offbeat.RankLost):
        sync.close(publish=False)  # publishing would wait for rank 0
    return sync.metrics.steps, shard, int(signed.get("process/0"))


def test_a_shard_whose_supervisor_died_is_started_again_by_another_rank(crew: Callable[[int], Crew]) -> None:
    hired = crew(3)
    hired.start(patched, _orphaned)
    outcomes = hired.outcomes([1, 2])
    assert all(fine for fine, _ in outcomes), outcomes
    for steps, before, after in (value for _, value in outcomes):
        assert (steps, before != after) == (STEPS, True)
        until(lambda after=after: not is_running(after))
