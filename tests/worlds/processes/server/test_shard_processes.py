"""A shard and its workers, as real processes: stopped, cut off and killed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offbeat import SSP
from offbeat.worlds.processes.server.auth import TOKEN
from offbeat.worlds.processes.server.config import ServerSpec
from tests.support.limits import HANG_S, SILENCE_S
from tests.support.served import Serve
from tests.support.served import serve as serve
from tests.support.standalone_workers import Lone, Mortal

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
    monkeypatch.setattr(
        ServerSpec, "of", lambda *a: replace(make(*a), timeout_s=2 * SILENCE_S), raising=True
    )
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
    first.leave()
    assert served.end() == 0
    assert "worker 1 is silent, removed" in " ".join(served.said.split())
