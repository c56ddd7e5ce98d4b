"""Threads inside calls of torch, when the interpreter ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes

# A thread is in C++ code when the main one ends. The last thing that goes when the interpreter is torn down
# waits until that thread has come back, so that it does so at the worst moment.
SCRIPT = """
import os, sys, time
from datetime import timedelta
import torch.distributed as dist
from offbeat.worlds.processes.apart import run_apart

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
thread = run_apart("waiting", store.wait, ["never set"], timedelta(seconds=1))

class Last:
    def __init__(self, *needed):
        self.needed = needed

    def __del__(self):
        exists, sleep, task = self.needed
        for _ in range(3000):
            if not exists(task):
                break
            sleep(0.01)

sys.last = Last(os.path.exists, time.sleep, f"/proc/self/task/{thread.native_id}")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_thread_that_comes_back_late_does_not_end_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=HANG_S)
    assert ended.returncode == 0, ended.stderr
