"""A running `offbeat serve`, which ends with the test."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest

from offbeat.worlds.processes.server.auth import TOKEN
from tests.support.limits import HANG_S
from tests.support.python import Python

Serve = Callable[..., "Served"]
FORKED = """
import runpy
from offbeat.worlds.processes.server import supervisor
from tests.support.forked_shards import fork_shards
fork_shards()
supervisor.QUICKLY_S = 0.0  # a test kills a shard as soon as it can
runpy.run_module("offbeat", run_name="__main__", alter_sys=True)
"""


class Served:
    """A running `offbeat serve`."""

    def __init__(self, *options: str, token: str = "secret", forked: bool = False) -> None:
        how = ("-c", FORKED) if forked else ("-m", "offbeat")
        self.process = Python(
            *(*how, "serve", *options),
            env={**os.environ, TOKEN: token, "COLUMNS": "40"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.said = ""
        self.address = self.hear(r" at (127\.0\.0\.1:\d+)") if "--listen" in options else ""

    def hear(self, wanted: str) -> str:
        """Read on until this is said."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line
            if found := re.search(wanted, line):
                return found[1] if found.groups() else found[0]
        raise AssertionError(f"never said {wanted}: {self.said}")

    def end(self) -> int:
        """It ends by itself."""
        rest, _ = self.process.communicate(timeout=HANG_S)
        self.said += rest
        return self.process.returncode


def _serving(forked: bool) -> Iterator[Serve]:
    running: list[Served] = []

    def start(*options: str, **rest: str) -> Served:
        running.append(Served(*options, **rest, forked=forked))
        return running[-1]

    yield start
    for served in running:
        if served.process.poll() is None:
            os.killpg(served.process.pid, signal.SIGKILL)
        served.process.communicate()


@pytest.fixture
def serve() -> Iterator[Serve]:
    yield from _serving(forked=False)


@pytest.fixture(name="serve")
def forked_serve() -> Iterator[Serve]:
    """Serve with shards that are forked, and need not import torch."""
    yield from _serving(forked=True)
