"""Two ranks that run a framework's loop, as its users start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.limits import HANG_S

ROOT = Path(__file__).parents[2]
Outcome = dict[str, Any]  # of one rank
Run = Callable[..., list[list[Outcome]]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a loop in several ways in the same two processes; return what each rank has come to, by way."""

    def start(loop: str, *ways: dict[str, Any]) -> list[list[Outcome]]:
        folder = tmp_path_factory.mktemp(loop)
        outs = [folder / str(number) for number in range(len(ways))]
        for out in outs:
            out.mkdir()
        wished = [{"out": str(out), **way} for out, way in zip(outs, ways, strict=True)]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        module = ["-m", f"tests.integrations.loops.{loop}", json.dumps(wished).replace("FOLDER", str(folder))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*launcher, *module], cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return [[torch.load(out / f"rank-{rank}.pt") for rank in range(2)] for out in outs]

    return start


def check_like_ddp(theirs: list[Outcome], ours: list[Outcome]) -> None:
    """All parameters are the same, bit for bit. DDP does not average what batch norm has seen."""
    for one, other in zip(theirs, ours, strict=True):
        for name, value in one["state"].items():
            if "running" not in name:
                assert torch.equal(value, other["state"][name]), name


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two ranks hold the same model, bit for bit."""
    return all(torch.equal(value, other["state"][name]) for name, value in one["state"].items())
