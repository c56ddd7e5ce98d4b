"""`offbeat serve`, and workers that come to it by themselves: no launcher, no process group.

Updates are whole numbers: each push adds 1 to every weight, so the weights tell how many pushes they hold.
"""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import offbeat
from offbeat import ASP, SSP
from offbeat.worlds.processes.server import channel
from offbeat.worlds.processes.server.auth import TOKEN
from offbeat.worlds.processes.server.bootstrap import SERVER
from offbeat.worlds.processes.server.snapshots import Snapshots
from tests.support.beside import beside
from tests.support.counting import Counting, counted, counting_optimizer
from tests.support.limits import HANG_S, SILENCE_S
from tests.support.ports import free_port
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


def shot(folder: Path) -> Any:
    return Snapshots(folder / "shard-0", 1.0).read()


# --- coming and going


def test_workers_come_die_and_join(serve: Serve, tmp_path: Path) -> None:
    served = serve(
        "--workers", "2", "--listen", "127.0.0.1:0", "--snapshots", str(tmp_path), "--every", "1000"
    )
    first = Lone(served.address, BOUND, 2)
    mortal = Mortal(served.address)
    assert counted(first.model) == 0 and first.sync is not None
    for _ in range(3):
        step = first.start()
        mortal.step()
        step.result(HANG_S)
    mortal.kill()
    assert [first.step() for _ in range(3)] == [7, 8, 9], "it does not wait for the dead"
    third = Lone(served.address, BOUND, 2)
    assert third.sync.port.rank == 1, "the third of two looks at the dead one's part of the data"
    assert counted(third.model) == 9, "it has the current weights"
    way = third.sync.port.client.transport.channels[0]  # type: ignore[union-attr]
    assert way.clock == 6, "and the slowest clock"
    assert first.step() == 10
    ahead = first.start()  # two ahead of the third: it waits
    assert third.step() in (11, 12)
    ahead.result(HANG_S)
    assert way.clock == 7
    third.step()
    assert counted(first.model) < 13, "the third's last update came after its last pull"
    assert [worker.leave().staleness_max for worker in (first, third)] == [1, 0]
    assert [counted(worker.model) for worker in (first, third)] == [13, 13], "closing publishes"
    assert served.end() == 0
    assert "all workers have left" in served.said
    told = " ".join(served.said.split())
    assert "serving 2 workers at " in told and "server processes here: 1 of 1" in told
    assert "training: ssp overlap=false push=update staleness=1, a model of " in told, "as one types settings"
    memory = shot(tmp_path)
    assert memory.applied == {0: 8, 1: 3, 2: 8}
    assert all(bool((weight[:50] == 8 + 3 + 2).all()) for weight in memory.weights)


def test_what_does_not_fit_is_told_and_harms_nobody(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve("--workers", "1", "--listen", "127.0.0.1:0", "--snapshots", str(tmp_path))

    def told(
        error: type[Exception],
        words: str,
        address: str = served.address,
        numel: int = 50,
        timeout_s: float = HANG_S,
        rate: float = 1.0,
    ) -> None:
        model = Counting(1, numel)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        strategy = ASP(overlap=rate == 1.0)
        with pytest.raises(error, match=words):
            offbeat.attach(model, optimizer, strategy, timeout_s=timeout_s, server=address)

    monkeypatch.setenv(TOKEN, "guess")
    told(offbeat.LaunchError, f"the server at {served.address} has another token: check {TOKEN}")
    monkeypatch.delenv(TOKEN)
    told(offbeat.LaunchError, f"set {TOKEN} to the secret")
    monkeypatch.setenv(TOKEN, "secret")
    good = Lone(served.address, ASP(overlap=False), 1)
    assert good.step() == 1
    told(offbeat.MismatchError, "does not train what the server holds: parameter weight", numel=51)
    told(offbeat.MismatchError, "strategy is ASP")  # which overlaps
    told(offbeat.MismatchError, "learning rate of group 1 is 7 there, 1 on rank 0", rate=7.0)
    told(offbeat.LaunchError, "not an address", "nowhere")
    nobody = f"127.0.0.1:{free_port()}"
    words = f"no server at {nobody}: .*is `offbeat serve` running there"
    told(offbeat.LaunchError, words, nobody, timeout_s=SILENCE_S)
    assert good.step() == 2
    good.leave()
    assert served.end() == 0


def test_an_interrupted_server_goes_on_from_its_snapshots(serve: Serve, tmp_path: Path) -> None:
    options = ["--workers", "1", "--listen", "127.0.0.1:0", "--snapshots", str(tmp_path), "--every", "0.05"]
    served = serve(*options)
    worker = Lone(served.address, ASP(overlap=False), 1)
    for _ in range(5):
        worker.step()
    until(lambda: (memory := shot(tmp_path)) and memory.applied == {0: 5})
    os.killpg(served.process.pid, signal.SIGINT)  # as a terminal does: all of its processes
    assert served.end() == 130
    assert "the last snapshots stay" in served.said
    assert "Traceback" not in served.said and "died" not in served.said
    worker.leave(publish=False)  # no server is there to read from
    again = serve(*options)
    newcomer = Lone(again.address, ASP(overlap=False), 1)
    newcomer.attached.result(HANG_S)
    assert counted(newcomer.model) == 5
    assert newcomer.step() == 6
    newcomer.leave()
    assert again.end() == 0
    assert all(bool((weight[:50] == 6).all()) for weight in shot(tmp_path).weights)


def test_a_server_that_cannot_go_on_says_why(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shard-0").write_bytes(b"rubbish")
    monkeypatch.setattr(channel, "JOIN_TIMEOUT_S", 1.0)  # when it has passed, the worker tries again
    served = serve("--workers", "1", "--listen", "127.0.0.1:0", "--snapshots", str(tmp_path))
    model = Counting(1)
    how = {"timeout_s": HANG_S, "server": served.address}
    attached = beside(partial(offbeat.attach, model, counting_optimizer(model), ASP(), **how))
    assert served.end() == 2
    late = SimpleNamespace(sleep=time.sleep, monotonic=lambda: time.monotonic() + 2 * HANG_S)
    monkeypatch.setattr(channel, "time", late)  # the worker has waited for longer than it was to
    with pytest.raises(
        offbeat.RankLost, match=f"shard 0 of the server at {served.address} cannot be reached"
    ):
        attached.result(HANG_S)
    said = " ".join(served.said.split())
    assert "shard-0 cannot be read" in said and "move it away to start anew" in said
    assert "a shard cannot continue; its error is printed above" in said


def test_a_second_host_joins(serve: Serve, tmp_path: Path) -> None:
    first = serve(
        *("--workers", "1", "--listen", "127.0.0.1:0", "--shards", "2", "--here", "1"),
        *("--snapshots", str(tmp_path / "first")),
    )
    assert first.hear(rf"^  {SERVER}={first.address} {TOKEN}=secret python train.py$"), "one line, to copy"
    stranger = serve("--join", first.address, token="guess")
    second = serve("--join", first.address, "--snapshots", str(tmp_path / "second"))
    worker = Lone(first.address, ASP(overlap=False), 1)
    assert stranger.end() == 2
    assert f"has another token: check {TOKEN}" in stranger.said
    assert [worker.step() for _ in range(3)] == [1, 2, 3]
    assert len(worker.sync.port.client.transport.channels) == 2  # type: ignore[union-attr]
    superfluous = serve("--join", first.address)
    assert superfluous.end() == 2
    assert "2 of them already run elsewhere" in superfluous.said
    worker.leave()
    assert (first.end(), second.end()) == (0, 0), first.said + second.said
    shares = [Snapshots(tmp_path / name, 1.0).read() for name in ("first/shard-0", "second/shard-1")]
    held = torch.cat([share.weights[0] for share in shares if share])
    assert bool((held[:50] == 3).all())
