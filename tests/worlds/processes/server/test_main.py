"""The process of one shard, started as the supervisor starts it: how it ends, and what it says."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from offbeat.worlds.processes.server.auth import TOKEN
from offbeat.worlds.processes.server.channel import ClientIdentity, ShardChannel
from offbeat.worlds.processes.server.supervisor import EXIT_UNRECOVERABLE, command
from tests.support.beside import post
from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes


def started(folder: Path, store: dist.TCPStore) -> subprocess.Popen[str]:
    config = replace(post(folder, [("float32", 4)]), tcp_port=store.port, prefix="mine", parent=os.getpid())
    environment = {**os.environ, TOKEN: "secret"}
    return subprocess.Popen(command(config), env=environment, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_a_shard_ends_when_its_last_worker_has_left(tmp_path: Path, store: dist.TCPStore) -> None:
    with started(tmp_path, store) as process:
        identity = ClientIdentity(dist.PrefixStore("mine", store), "127.0.0.1", 0, b"secret", HANG_S)
        channel = ShardChannel(identity, 0, "shard 0")
        assert (channel.clock, channel.has_weights) == (0, False)
        channel.leave()
        _, said = process.communicate(timeout=HANG_S)
    assert (process.returncode, said) == (0, "")


def test_a_shard_that_would_fail_again_says_why(tmp_path: Path, store: dist.TCPStore) -> None:
    (tmp_path / "shard-0").write_bytes(b"rubbish")
    with started(tmp_path, store) as process:
        _, said = process.communicate(timeout=HANG_S)
    assert process.returncode == EXIT_UNRECOVERABLE
    assert said.startswith(f"offbeat server: shard 0: the snapshot {tmp_path / 'shard-0'} cannot be read")
