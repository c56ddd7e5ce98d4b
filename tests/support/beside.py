"""A parameter server whose shards are threads of the ranks: it starts in no time, over links that are real.

tests/processes has those that are processes; a suite that attaches some hundred times cannot wait for them.
And what a shard is told, and who speaks to it, where a test plays the worker by hand.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch.distributed as dist

from offbeat.worlds.processes.server import bootstrap as enrolment
from offbeat.worlds.processes.server.config import ShardConfig
from offbeat.worlds.processes.server.shard import ShardServer
from tests.support.limits import HANG_S


class Beside:
    """Stands in for a Supervisor."""

    pid = None

    def __init__(self, config: ShardConfig, token: bytes, on_failure: Callable[[str], None]) -> None:
        self._threads = []
        for each in config.of_process():
            client = dist.TCPStore(config.host, config.tcp_port, is_master=False, wait_for_workers=False)
            shard = ShardServer(
                replace(each, parent=os.getppid()), dist.PrefixStore(config.prefix, client), token
            )
            self._threads.append(Thread(target=shard.run, daemon=True))
            self._threads[-1].start()

    def stop(self, patience_s: float) -> None:
        for thread in self._threads:
            thread.join(patience_s)
            assert not thread.is_alive()


def lightly(function: Callable[..., Any], *args: Any) -> Any:
    """What a rank of a crew is told to do, with servers beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(enrolment, "Supervisor", Beside)
        return function(*args)


# --- by hand


def beside(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Run something beside the test; its result is to be asked for."""
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as failed:
            future.set_exception(failed)

    Thread(target=work, daemon=True).start()  # a test that fails must not wait for it
    return future


def post(folder: Path, sizes: list[tuple[str, int]], strategy: str = "asp", **rest: Any) -> ShardConfig:
    """What a shard is told that holds tensors of these sizes; `rest` are the strategy's settings, or ours."""
    told: dict[str, Any] = {"workers": 1, "local_workers": [0], "timeout_s": HANG_S, "optimizer": None}
    told |= {name: rest.pop(name) for name in list(rest) if name in told}
    where: Any = {"host": "127.0.0.1", "tcp_port": 9, "prefix": "", "shard": 0, "parent": os.getppid()}
    kept: Any = {"snapshot": str(folder / "shard-0"), "snapshot_s": 1000.0}
    return ShardConfig(**where, **kept, **told, strategy=strategy, settings=rest, sizes=sizes)
