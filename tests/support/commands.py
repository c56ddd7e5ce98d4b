"""The commands of `offbeat`, run inside the test's own process or in one of their own."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from offbeat.cli import main
from tests.support.limits import HANG_S
from tests.support.python import Python


@dataclass(frozen=True)
class Said:
    code: object
    out: str
    err: str


def command(*args: object) -> Said:
    """What `offbeat ARGS` says and how it exits, without the seconds that a new process takes."""
    out, err = io.StringIO(), io.StringIO()
    given = patch.object(sys, "argv", ["offbeat", *map(str, args)])
    with given, redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as left:
        main()
    return Said(left.value.code, out.getvalue(), err.getvalue())


def simulate(folder: Path, *args: object) -> Said:
    """A tiny run into `folder`."""
    return command("simulate", "quadratic", "--workers", 2, "--steps", 2, "--out", folder, *args)


WORKERS = '[[workers]]\nstep_s = 0.1\nup = "1gbit"\ndown = "1gbit"\n'


FIELDS = {
    *("strategy", "settings", "task", "world", "workers", "seed", "steps", "samples", "seconds"),
    *("samples_per_second", "bytes_sent", "sync_steps", "local_steps", "metric", "value", "best", "target"),
    *("seconds_to_target", "per_worker", "history", "complete", "model", "cluster"),
}
WORKER_FIELDS = {
    *("rank", "steps", "compute_s", "communicate_s", "wait_s", "bytes_sent"),
    *("staleness_mean", "staleness_max"),
}


def summary_of(folder: Path) -> dict[str, Any]:
    """The summary, as strict JSON: NaN and Infinity are none."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"summary.json holds {constant}, which is not JSON")

    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(), parse_constant=refuse)
    assert summary.keys() >= FIELDS
    assert all(worker.keys() >= WORKER_FIELDS for worker in summary["per_worker"])
    return summary


def offbeat(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `python -m offbeat ARGUMENTS` in a process of its own."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with Python("-m", "offbeat", *map(str, arguments), **pipes) as process:
        try:
            out, err = process.communicate(timeout=HANG_S)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def compare(folder: Path, *args: object) -> Said:
    small = ("--world", "virtual", "--workers", 2, "--steps", 6, "--evaluate-every", 2, "--out", folder)
    return command("compare", "quadratic", "--strategies", "bsp,local_sgd", *small, *args)


def read_summary(folder: Path) -> Any:
    return json.loads((folder / "summary.json").read_text())
