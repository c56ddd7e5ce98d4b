"""Provenance of a result: which command made it, on which machine, with which versions."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch


def origin() -> dict[str, Any]:
    """Return what others need to repeat a result: command, time, machine and versions."""
    return {
        "command": shlex.join(["offbeat", *sys.argv[1:]]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": environment(),
    }


def environment() -> dict[str, str]:
    """Describe the machine and the versions."""
    found = {
        "offbeat": _version("offbeat"),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": str(os.cpu_count() or "unknown"),
        "threads": str(torch.get_num_threads()),
    }
    if torch.cuda.is_available():
        found["GPU"] = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}"
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a source tree
        return "unknown"
