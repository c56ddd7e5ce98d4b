"""Shards that are processes and start in no time: forked, by tests/support/python.py."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

from offbeat.worlds.processes.server import supervisor
from tests.support.python import Python, fork_zygote


def fork_shards(*unwanted: int) -> None:
    """Let this process, which has a single thread, fork its shards; they keep no `unwanted` files."""
    fork_zygote(*unwanted)
    forked = SimpleNamespace(Popen=_start_shard, PIPE=subprocess.PIPE)
    supervisor.subprocess = forked  # type: ignore[attr-defined]


def _start_shard(command: list[str], **options: Any) -> Python:
    return Python(*command[1:], **options)
