"""A shard and its workers, as real processes: stopped, cut off and killed."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offbeat import ASP, SSP
from offbeat.worlds.processes.server import bootstrap
from offbeat.worlds.processes.server.auth import TOKEN
from offbeat.worlds.processes.server.bootstrap import Rendezvous, required_token
from offbeat.worlds.processes.server.config import ServerSpec
from offbeat.worlds.processes.server.discovery import resolve
from tests.support.limits import HANG_S, SILENCE_S
from tests.support.proxy import Proxy
from tests.support.served import Serve
from tests.support.served import forked_serve as forked_serve
from tests.support.standalone_workers import Lone, Mortal
from tests.support.waiting import until

pytestmark = pytest.mark.processes

BOUND = SSP(staleness=1, overlap=False)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "secret")
    monkeypatch.delenv("RANK", raising=False)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server that takes a worker for lost after a short silence; workers wait for as long as it takes."""
    make = ServerSpec.of
    monkeypatch.setattr(ServerSpec, "of", lambda *a: replace(make(*a), timeout_s=2 * SILENCE_S), raising=True)
    yield


def test_a_worker_that_was_stopped_for_long_delays_nobody_when_it_returns(
    serve: Serve, tmp_path: Path, impatient: Any
) -> None:
    served = serve("--workers", "2", "--listen", "127.0.0.1:0", "--snapshots", str(tmp_path))
    first = Lone(served.address, BOUND, 2)
    mortal = Mortal(served.address)
    for _ in range(2):
        step = first.start()
        mortal.step()
        step.result(HANG_S)
    mortal.stop()
    assert [first.step() for _ in range(20)] == list(range(5, 25)), "the silent one was removed"
    mortal.resume()
    mortal.step()  # from weights of long ago: dropped
    assert first.step() == 25, "no update of long ago, and nobody waits until the other has caught up"
    step = first.start()
    mortal.step()
    step.result(HANG_S)
    mortal.step()
    assert first.step() >= 28
    mortal.kill()
    for _ in range(3):  # beyond the bound: until the server knows of the death, which must not come last
        first.step()
    first.leave()
    assert served.end() == 0
    assert "worker 1 is silent, removed" in " ".join(served.said.split())


def test_a_worker_whose_connections_are_reset_trains_on(serve: Serve, tmp_path: Path) -> None:
    """That to the store, through which it finds the shard, and that to the shard."""
    served = serve("--workers", "1", "--listen", "127.0.0.1:0", "--snapshots", str(tmp_path))
    host, tcp_port = served.address.split(":")
    proxy = Proxy(host, int(tcp_port))
    worker = Lone(proxy.address, ASP(overlap=False), 1)
    for count in (1, 2, 3):
        assert worker.step() == count
        proxy.reset()
        worker.sync.port.client.transport.channels[0]._pipeline._connection.end()  # type: ignore[union-attr]
    assert worker.step() == 4
    worker.leave()
    proxy.close()
    assert served.end() == 0


def test_a_shard_that_may_open_no_more_files_serves_on(serve: Serve, tmp_path: Path) -> None:
    """And admits workers again when there are some."""
    served = serve("--workers", "1", "--listen", "127.0.0.1:0", "--snapshots", str(tmp_path))
    before = children(served.process.pid)
    worker = Lone(served.address, ASP(overlap=False), 1)
    assert worker.step() == 1
    (pid,) = children(served.process.pid) - before
    store = worker.sync.port.failures.store
    token = Rendezvous.at(served.address, required_token(), HANG_S).token
    address = until(lambda: resolve(store, token, 0, "127.0.0.1"))
    room = max(int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()) + 8
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (room, room))
    strangers = [socket.create_connection(address.endpoint, timeout=HANG_S) for _ in range(100)]
    served.hear("cannot accept connections")
    assert [worker.step() for _ in range(3)] == [2, 3, 4]
    for stranger in strangers:
        stranger.close()
    another = Lone(served.address, ASP(overlap=False), 1)
    assert another.step() == 5
    for each in (another, worker):
        each.leave()
    assert served.end() == 0
    assert "accepts connections again" in " ".join(served.said.split())
    assert "restarting" not in served.said


def test_a_worker_that_dies_before_it_brings_the_weights_is_replaced(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "INITIALIZATION_S", 0.1)
    served = serve("--workers", "2", "--listen", "127.0.0.1:0", "--snapshots", str(tmp_path))
    first = Rendezvous.at(served.address, required_token(), HANG_S)
    assert first.claim_initialization()  # and then it is gone
    workers = [Lone(served.address, ASP(overlap=False), 2) for _ in range(2)]
    assert all(worker.sync for worker in workers)
    assert sorted(worker.step() for worker in workers) == [1, 2]
    for worker in workers:
        worker.leave()
    assert served.end() == 0


def children(parent: int) -> set[int]:
    """Processes that a process has started."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent:
                found.add(int(path.parent.name))
    return found
