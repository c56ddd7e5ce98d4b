"""Scripts of the installed frameworks, unchanged but for one line.

A copy is made when a test runs: no line of theirs is in this repository.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from tests.support.limits import HANG_S

ROOT = Path(__file__).parents[2]
PYTHONPATH = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")]))


def installed(package: str, path: str) -> str:
    """Return the text of a file of an installed package."""
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    return (Path(spec.submodule_search_locations[0]) / path).read_text("utf-8")


def patch(text: str, imports: str, changes: dict[str, str]) -> str:
    """Return a script with our imports before its own, and each line of `changes` replaced by another."""
    for old, new in changes.items():
        assert old in text, f"the script has no line {old!r} any more"
        text = text.replace(old, new)
    lines = text.splitlines(keepends=True)
    first = next(number for number, line in enumerate(lines) if line.startswith(("import ", "from ")))
    return "".join([*lines[:first], f"{imports}\n", *lines[first:]])


def torchrun(*command: str, cwd: Path, **environment: str) -> str:
    """Run a script on two ranks, and return what it printed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    return run([*launcher, *command], cwd, **environment)


def run(command: list[str], cwd: Path, limit_s: float = HANG_S, **environment: str) -> str:
    """Run a command with the sources of this repository, and return what it printed.

    One that hangs ends with all that it started, and says where each of them stood.
    """
    ours = {"OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH, "PYTHONFAULTHANDLER": "1"}
    with subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, **ours, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            said, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGABRT)
            said, errors = process.communicate()
            raise AssertionError(f"not ended after {limit_s:.0f} s\n{said}{errors}") from None
    assert process.returncode == 0, said + errors
    return said
