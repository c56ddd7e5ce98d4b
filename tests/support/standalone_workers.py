"""Workers that come to `offbeat serve` by themselves: threads of the test, or processes to be killed."""

from __future__ import annotations

import os
import signal
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import offbeat
from offbeat.worlds.processes.server.bootstrap import SERVER, Rendezvous, required_token
from tests.conformance.table import AnyStrategy
from tests.support.counting import Counting, count_on, counted, counting_optimizer
from tests.support.limits import HANG_S
from tests.support.python import Python


class Lone:
    """A worker of this process, with a thread of its own: what it waits for, it waits for there."""

    def __init__(self, address: str, strategy: AnyStrategy, world: int, numel: int = 50) -> None:
        self.model = Counting(world, numel)
        self.optimizer = counting_optimizer(self.model)
        self._thread = ThreadPoolExecutor(1)
        self.attached = self._thread.submit(
            offbeat.attach, self.model, self.optimizer, strategy, timeout_s=HANG_S, server=address
        )

    @property
    def sync(self) -> offbeat.Sync:
        return self.attached.result(HANG_S)

    def start(self) -> Future[None]:
        return self._thread.submit(count_on, self.model, self.optimizer)

    def step(self) -> int:
        self.start().result(HANG_S)
        return counted(self.model)

    def leave(self, publish: bool = True) -> Any:
        self._thread.submit(self.sync.close, publish=publish).result(HANG_S)
        self._thread.shutdown()
        return self.sync.metrics


MORTAL = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parents[2])]!r}
import offbeat
from tests.support.counting import *
model = Counting(2)
optimizer = counting_optimizer(model)
with offbeat.attach(model, optimizer, offbeat.SSP(staleness=1, overlap=False), timeout_s={HANG_S}):
    for line in sys.stdin:
        count_on(model, optimizer)
        print("stepped", flush=True)
"""


class Mortal:
    """A worker that is a process, to be killed. It comes after another, whose settings are the server's."""

    def __init__(self, address: str, **environment: str) -> None:
        Rendezvous.at(address, required_token(), HANG_S).wait_for_spec()
        self.process = Python(
            *("-c", MORTAL),
            env={**os.environ, SERVER: address, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def step(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "stepped\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)
