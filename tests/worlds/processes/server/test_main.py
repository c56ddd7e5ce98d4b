"""The process of one shard, started as the supervisor starts it: how it ends, and what it says."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from offbeat.worlds.processes.server import supervisor as keeper
from offbeat.worlds.processes.server.auth import TOKEN
from offbeat.worlds.processes.server.channel import ClientIdentity, ShardChannel
from offbeat.worlds.processes.server.config import ShardConfig
from offbeat.worlds.processes.server.supervisor import EXIT_UNRECOVERABLE, Supervisor, as_text, command
from tests.support.beside import post
from tests.support.limits import HANG_S
from tests.support.waiting import until

pytestmark = pytest.mark.processes


def config_for(folder: Path, store: dist.TCPStore) -> ShardConfig:
    return replace(post(folder, [("float32", 4)]), tcp_port=store.port, prefix="mine", parent=os.getpid())


def started(config: ShardConfig | None) -> subprocess.Popen[str]:
    environment = {**os.environ, TOKEN: "secret"}
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command(config), env=environment, text=True, **pipes)


def join_and_leave(store: dist.TCPStore) -> None:
    identity = ClientIdentity(dist.PrefixStore("mine", store), "127.0.0.1", 0, b"secret", HANG_S)
    channel = ShardChannel(identity, 0, "shard 0")
    assert (channel.clock, channel.has_weights) == (0, False)
    channel.leave()


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_a_shard_ends_when_its_last_worker_has_left(tmp_path: Path, store: dist.TCPStore) -> None:
    with started(config_for(tmp_path, store)) as process:
        join_and_leave(store)
        _, said = process.communicate(timeout=HANG_S)
    assert (process.returncode, said) == (0, "")


def test_a_shard_that_would_fail_again_says_why(tmp_path: Path, store: dist.TCPStore) -> None:
    (tmp_path / "shard-0").write_bytes(b"rubbish")
    with started(config_for(tmp_path, store)) as process:
        _, said = process.communicate(timeout=HANG_S)
    assert process.returncode == EXIT_UNRECOVERABLE
    assert said.startswith(f"offbeat server: shard 0: the snapshot {tmp_path / 'shard-0'} cannot be read")


def test_a_spare_becomes_the_shard_that_it_is_told_to_be(tmp_path: Path, store: dist.TCPStore) -> None:
    with started(None) as process:
        assert process.stdin is not None
        process.stdin.write(as_text(config_for(tmp_path, store)) + "\n")
        process.stdin.flush()
        join_and_leave(store)
        _, said = process.communicate(timeout=HANG_S)
    assert (process.returncode, said) == (0, "")


def test_a_spare_ends_with_its_supervisor() -> None:
    with started(None) as process:
        _, said = process.communicate(timeout=HANG_S)  # closes its input, as the end of the supervisor does
    assert (process.returncode, said) == (0, "")


def test_a_shard_that_died_is_started_in_the_spare(
    tmp_path: Path, store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And there is a new spare, which ends with the supervision."""
    monkeypatch.setattr(keeper, "QUICKLY_S", 0.0)
    config = replace(config_for(tmp_path, store), dedicated=True, second=0)
    supervisor = Supervisor(config, b"secret")
    spare = supervisor._spare
    assert spare is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    until(lambda: supervisor.pid == spare.pid)
    until(lambda: supervisor._spare is not None and supervisor._spare is not spare)
    supervisor.stop(0.0)
    assert supervisor._spare is not None and supervisor._spare.poll() is not None
