"""Ctrl-C reaches all processes of a terminal: it interrupts workers, not the imports that they wait for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.worlds.processes.launcher import START_METHOD
from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes

INTERRUPTED = """
import os, signal
os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C in a terminal does, while modules are imported
def tell():
    print("heard" if signal.getsignal(signal.SIGINT) is signal.default_int_handler else "ignored")
"""
STARTED = """
import multiprocessing, {first}
from offbeat.worlds.processes.launcher import start_fork_server
if __name__ == "__main__":
    start_fork_server(["interrupted_import"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for what is imported here
    from interrupted_import import tell
    worker = multiprocessing.get_context("forkserver").Process(target=tell)
    worker.start()
    worker.join()
"""


@pytest.mark.skipif(START_METHOD != "forkserver", reason="workers are forked on Linux only")
@pytest.mark.parametrize(
    ("first", "told"),
    [("signal", "heard"), ("signal; signal.signal(signal.SIGINT, signal.SIG_IGN)", "ignored")],
)
def test_an_interrupt_does_not_reach_imports_but_workers(first: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "interrupted_import.py").write_text(INTERRUPTED)
    (tmp_path / "started.py").write_text(STARTED.format(first=first))
    found = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    command = [sys.executable, str(tmp_path / "started.py")]
    said = subprocess.run(command, capture_output=True, text=True, env=found, timeout=HANG_S)
    assert said.stderr == ""
    assert said.stdout == f"{told}\n"
