"""Random numbers by counter: each depends on its arguments alone, not on earlier calls or on libraries."""

from __future__ import annotations

import math
from statistics import NormalDist

_WORD = (1 << 64) - 1
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64


def uniform(seed: int, worker: int, step: int) -> float:
    """Return a number inside (0, 1)."""
    word = 0
    for part in (seed, worker, step):
        # SplitMix64's finalizer, over the words one after the other
        word = ((word ^ (part & _WORD)) + _GAMMA) & _WORD
        word = ((word ^ (word >> 30)) * _FIRST) & _WORD
        word = ((word ^ (word >> 27)) * _SECOND) & _WORD
        word ^= word >> 31
    return ((word >> 12) + 0.5) / (1 << 52)


def lognormal(deviation: float, seed: int, worker: int, step: int) -> float:
    """Return a factor with the median 1 and this deviation of the logarithm."""
    return math.exp(deviation * NormalDist().inv_cdf(uniform(seed, worker, step)))
