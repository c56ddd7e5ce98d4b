"""A shard dies, without a copy, when a worker's loop has ended: the worker is told what was lost.

Updates are whole numbers: each push adds 1 to every weight, so the weights tell how many pushes they hold.
"""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

import offbeat
from offbeat import ASP
from offbeat.worlds.processes.server import bootstrap, supervisor
from offbeat.worlds.processes.server.auth import TOKEN
from offbeat.worlds.processes.server.bootstrap import Rendezvous, required_token
from offbeat.worlds.processes.server.signed_store import SignedStore
from offbeat.worlds.processes.server.snapshots import Snapshots
from offbeat.worlds.processes.server.transport import ProcessServerClient
from tests.support.counting import Counting, count_on, counted, counting_optimizer
from tests.support.crew import Crew
from tests.support.limits import HANG_S
from tests.support.lost import patched
from tests.support.served import Serve
from tests.support.served import forked_serve as forked_serve
from tests.support.standalone_workers import Lone
from tests.support.waiting import until

pytestmark = pytest.mark.processes

STEPS = 5


def test_a_worker_whose_loop_has_ended_is_told_and_its_server_ends(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(TOKEN, "secret")
    monkeypatch.delenv("RANK", raising=False)
    path = tmp_path / "shard-0"
    served = serve(
        "--workers", "1", "--listen", "127.0.0.1:0", "--snapshots", str(tmp_path), "--every", "1000"
    )
    worker = Lone(served.address, ASP(overlap=False), 1)
    assert [worker.step() for _ in range(STEPS)] == list(range(1, STEPS + 1))
    held = until(lambda: Snapshots(path, 1.0).read()).applied.get(0, 0)
    rendezvous = Rendezvous.at(served.address, required_token(), HANG_S)
    os.kill(int(SignedStore(rendezvous.store, rendezvous.token).get("process/0")), signal.SIGKILL)
    served.hear("restarting")
    with caplog.at_level(logging.WARNING, "offbeat"):
        worker.leave()
    assert counted(worker.model) == held
    assert f"has lost {STEPS - held} of this worker's updates" in caplog.text
    assert served.end() == 0, "it knows that its last worker has left"


def test_a_snapshot_from_before_the_last_worker_joined_makes_nobody_wait_for_one_that_has_left(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(TOKEN, "secret")
    monkeypatch.delenv("RANK", raising=False)
    served = serve(
        "--workers", "2", "--listen", "127.0.0.1:0", "--snapshots", str(tmp_path), "--every", "1000"
    )
    first = Lone(served.address, ASP(overlap=False), 2)
    assert set(until(lambda: Snapshots(tmp_path / "shard-0", 1.0).read()).applied) == {0}
    second = Lone(served.address, ASP(overlap=False), 2)
    assert [second.step(), first.step(), first.step()] == [1, 2, 3]
    second.leave()
    rendezvous = Rendezvous.at(served.address, required_token(), HANG_S)
    os.kill(int(SignedStore(rendezvous.store, rendezvous.token).get("process/0")), signal.SIGKILL)
    served.hear("restarting")
    with caplog.at_level(logging.WARNING, "offbeat"):
        assert first.step() == 1, "it does not wait for the second, which is not in the snapshot"
    assert "has lost 2 of this worker's updates" in caplog.text
    first.leave()
    assert served.end() == 0


def _ended_first(patch: pytest.MonkeyPatch) -> tuple[int, str]:
    """Rank 1 has ended its loop when rank 0 kills the shard. What the model counts, and what was said."""
    rank = dist.get_rank()
    patch.setattr(supervisor, "QUICKLY_S", 0.0)
    patch.setattr(bootstrap, "SNAPSHOT_S", 1000.0)
    store = dist.PrefixStore("ended_first", _get_default_store())
    leave = ProcessServerClient.leave

    def leave_and_tell(client: ProcessServerClient) -> None:
        leave(client)
        store.set(f"left/{rank}", "")

    patch.setattr(ProcessServerClient, "leave", leave_and_tell)
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("offbeat").addHandler(handler)
    model = Counting(dist.get_world_size())
    optimizer = counting_optimizer(model)
    with offbeat.attach(model, optimizer, ASP(overlap=False), timeout_s=HANG_S) as sync:
        links: Any = sync.port.client.transport  # type: ignore[union-attr]
        if rank == 0:
            path, pid = Path(links._supervisor._config.snapshot), links.server_pid
            until(lambda: Snapshots(path, 1.0).read())
            store.set("snapshot", "")
        store.wait(["snapshot"], timedelta(seconds=HANG_S))
        for _ in range(STEPS):
            count_on(model, optimizer)
        if rank == 0:
            store.wait(["left/1"], timedelta(seconds=HANG_S))
            os.kill(pid, signal.SIGKILL)
            until(lambda: links.server_pid != pid)
    logging.getLogger("offbeat").removeHandler(handler)
    return counted(model), "\n".join(said)


def test_ranks_that_have_left_are_told_what_was_lost(crew: Callable[[int], Crew]) -> None:
    outcomes = crew(2).run(patched, _ended_first)
    lost = [
        sum(map(int, re.findall(r"has lost (\d+) of this worker's updates", said))) for _, said in outcomes
    ]
    assert all(lost), outcomes
    assert {total for total, _ in outcomes} == {2 * STEPS - sum(lost)}, "nothing is missing unsaid"
