"""Random numbers by counter: each depends on its arguments alone, not on earlier calls or on libraries."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

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


def lognormals(
    counters: npt.NDArray[np.int64], deviation: float | npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return a factor for each counter, with the median 1 and this deviation of the logarithm."""
    first, second = (_uniforms(2 * counters.astype(np.uint64) + np.uint64(half)) for half in (0, 1))
    normal = np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second)  # Box and Muller
    factors: npt.NDArray[np.float64] = np.exp(deviation * normal)
    return factors


def _uniforms(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    words = (words + np.uint64(1)) * np.uint64(_GAMMA)  # wraps around
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_FIRST)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_SECOND)
    words ^= words >> np.uint64(31)
    high = (words >> np.uint64(12)).astype(np.float64)
    return (high + 0.5) / float(1 << 52)
