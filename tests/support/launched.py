"""Two ranks on this machine: by torchrun itself, or forked, with what torchrun would tell them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from tests.support.limits import HANG_S
from tests.support.ports import free_port
from tests.support.python import ROOT, Python


def torchrun(*command: str) -> str:
    """Return what the ranks print under torchrun, which is forked; the ranks are not."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with Python(*launcher, *command, cwd=ROOT, **pipes) as running:
        try:
            out, err = running.communicate(timeout=HANG_S)
        finally:
            running.kill()
    assert running.returncode == 0, out + err
    return str(out)


def run_ranks(*command: str, cwd: Path = ROOT) -> str:
    """Return what the ranks print, which get the environment that torchrun gives."""
    meeting = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    meeting |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": cwd}
    ranks = [
        Python(*command, env={**os.environ, **meeting, "RANK": rank, "LOCAL_RANK": rank}, **pipes)
        for rank in "01"
    ]
    try:
        said = [rank.communicate(timeout=HANG_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    return "".join(out for out, _ in said)
