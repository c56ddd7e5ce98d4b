"""Lower bounds on step times, computed from a link's rate."""

from __future__ import annotations


def ring_s(nbytes: float, workers: int, bytes_per_s: float) -> float:
    """Return the seconds of a ring all-reduce of `nbytes` at this rate."""
    return 2 * (workers - 1) / workers * nbytes / bytes_per_s
