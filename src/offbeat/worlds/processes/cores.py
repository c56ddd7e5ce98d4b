"""Cores that this process may use: fewer than the machine has under taskset, Slurm or in a container."""

from __future__ import annotations

import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of the container, as "400000 100000" or "max 100000"


def usable_cores(quota: Path = QUOTA) -> int:
    """Return the number of cores for this process; at least 1.

    More threads than that would take turns: with six of sixteen cores, four workers with a thread for each of
    the machine's cores train at a fraction of their speed.
    """
    pinned = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        allowed, period = quota.read_text(encoding="ascii").split()
        return max(1, min(pinned, int(allowed) // int(period)))
    except (OSError, ValueError):  # no such file, or no limit
        return pinned
